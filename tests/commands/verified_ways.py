"""Ways to write a training, right and wrong, for a verification."""

from verified_scripts import FIT, LOOP, TWO_MODELS, WARMED_UP

REDUCED = "    tape = hvd.DistributedGradientTape(tape)\n"
GRADIENTS = "    gradients = tape.gradient(loss, model.trainable_variables)\n"
# `fit` with a train_step that computes gradients itself.
TRAIN_STEP = FIT.replace(
    "model = keras.Sequential([",
    """

class Model(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


model = Model([""",
).replace("import numpy as np", "import numpy as np\nimport tensorflow as tf")
LOSS = "loss_of(y, model(x, training=True))"
OTHER = "    gradients = tape.gradient(loss, target.trainable_variables)\n"
CLIP = "[tf.clip_by_norm(each, 0.01) for each in gradients]"
IMAGES = FIT.replace("size=(640, 8)", "size=(640, 8, 8, 3)").replace(
    "y = x.sum(axis=1, keepdims=True)", "y = x.sum(axis=(1, 2, 3))[:, None]"
)
# The layers of the model of FIT.
LAYERS = "[keras.Input((8,)), dense, middle, keras.layers.Dense(1)]"
ATTENTION = """
sequence = keras.Input((8,))
hidden = keras.layers.Dense(8)(keras.layers.Reshape((8, 1))(sequence))
hidden += keras.layers.MultiHeadAttention(2, 4)(hidden, hidden)
hidden = keras.layers.LayerNormalization()(hidden)
hidden = keras.layers.GlobalAveragePooling1D()(hidden)
model = keras.Model(sequence, keras.layers.Dense(1)(hidden))
"""
MODEL = f"model = keras.Sequential({LAYERS})"
SHUFFLED = "data.shuffle(640).shard(hvd.size(), hvd.rank())"
SHARD = "data.shard(hvd.size(), hvd.rank())"
# Samples that are all different.
DISTINCT = LOOP.replace("integers(1, 4, size=(640, 6))", "normal(size=(640, 6))")
DISTINCT = DISTINCT.replace(
    "labels = (ids", 'ids = ids.astype("float32")\nlabels = (ids'
)
DISTINCT = DISTINCT.replace("sum(axis=1) % 2)", "sum(axis=1) > 0)").replace(
    "[embedding, pool, ", '[keras.layers.Dense(16, "relu"), '
)


def changed(text, *replacements):
    """Return a script with some replacements, each of which it must contain."""
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    return text


SAMPLING = """

class Sampling(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, mean):
        shape = keras.ops.shape(mean)
        return mean + keras.random.normal(shape, seed=self.seed_generator)


middle = Sampling()
"""
GAN_STEP = """
        noise = keras.random.normal((len(y), 8), seed=self.generator)
        with tf.GradientTape() as tape:
            of_real, of_fake = self(x), self(keras.random.uniform((len(y), 8)) * noise)
            loss = keras.ops.mean((of_real - 1) ** 2 + of_fake**2)"""
OWN_METRIC = WARMED_UP[WARMED_UP.index("class Largest") : WARMED_UP.index(", loss=")]

# Ways to write a training that are right, beside those of CLEAN.
RIGHT = {
    "attention": changed(FIT, (MODEL, ATTENTION)),
    "a bias before a normalization": changed(
        FIT,
        ("keras.layers.Dropout(0.5)", "hvd.SyncBatchNormalization()"),
        ('Dense(16, "relu")', "Dense(16)"),
    ),
    "convolutions": changed(
        IMAGES,
        (
            LAYERS,
            """[
    keras.Input((8, 8, 3)),
    keras.layers.Conv2D(8, 3),
    hvd.SyncBatchNormalization(),
    keras.layers.ReLU(),
    keras.layers.Conv2D(8, 3),
    hvd.SyncBatchNormalization(),
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(1),
]""",
        ),
        ("Adam(0.01", "SGD(momentum=0.9, learning_rate=0.01"),
    ),
    "augmentation": changed(
        IMAGES,
        (
            LAYERS,
            """[
    keras.Input((8, 8, 3)),
    keras.layers.RandomFlip(),
    keras.layers.RandomTranslation(0.1, 0.1),
    keras.layers.Flatten(),
    dense,
    middle,
    keras.layers.Dense(1),
]""",
        ),
    ),
    "a seed of the shuffle": changed(
        DISTINCT, (SHARD, SHUFFLED.replace("640", "640, seed=1"))
    ),
    "a seed of all ranks": changed(
        DISTINCT,
        (SHARD, SHUFFLED),
        ("hvd.init()", "hvd.init()\nkeras.utils.set_random_seed(7)"),
    ),
    "clipping after the reduction": changed(
        LOOP, (GRADIENTS, f"{GRADIENTS}    gradients = {CLIP}\n")
    ),
    "a mean over the global batch": changed(
        LOOP,
        (LOSS, f"{LOSS} / hvd.size()"),
        ("Tape(tape)", "Tape(tape, op=hvd.Sum)"),
    ),
    "a sum with a weight": changed(
        FIT,
        (
            'loss="mse"',
            'loss=keras.losses.MeanSquaredError(reduction="sum"), '
            "loss_weights=[float(hvd.size())]",
        ),
    ),
    "weight decay": changed(
        FIT,
        (
            "Adam(0.01 * hvd.size())",
            "AdamW(0.01 * hvd.size(), weight_decay=0.01, use_ema=True)",
        ),
        ('Dense(16, "relu")', 'Dense(16, "relu", kernel_regularizer="l2")'),
    ),
    "a train_step": TRAIN_STEP,
    "a decision by a mean metric": changed(
        FIT,
        (
            "Callback(0)]",
            "Callback(0), hvd.callbacks.MetricAverageCallback(), "
            "keras.callbacks.EarlyStopping()]",
        ),
        ("verbose=0", "validation_data=(x, y), verbose=0"),
    ),
    "a variational autoencoder": changed(
        FIT, ("middle = keras.layers.Dropout(0.5)", SAMPLING)
    ),
    "noise of a train_step": changed(
        TRAIN_STEP,
        ("    def train_step", "    generator = None\n\n    def train_step"),
        (
            """
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))""",
            GAN_STEP.replace("len(y)", "keras.ops.shape(y)[0]"),
        ),
        (
            "model.compile(",
            "Model.generator = keras.random.SeedGenerator(3)\nmodel.compile(",
        ),
    ),
    # In a directory that is not there yet.
    "a checkpoint": changed(
        FIT,
        (
            "hvd.init()",
            """
hvd.init()
if hvd.rank() == 0:
    os.makedirs("results")
hvd.broadcast_object(None)""",
        ),
        ("import keras", "import os\n\nimport keras"),
        (MODEL, f"{MODEL}\nx, y = x[:80], y[:80]"),
        (
            "model.compile(",
            """
if os.path.exists("results/a.keras"):
    model = hvd.load_model("results/a.keras")
    optimizer = model.optimizer
model.compile(""",
        ),
        (
            "model.fit(",
            """
if hvd.rank() == 0:
    callbacks += [keras.callbacks.ModelCheckpoint("results/a.keras")]
model.fit(""",
        ),
    ),
    "a metric": changed(
        FIT, ("model.compile(optimizer", OWN_METRIC), ('["mae"]', '["mae", Largest()]')
    ),
}
# The same form as FAULTS.
WRONG = {
    "a sum of gradients": (
        LOOP,
        {
            "Adam(0.01": "SGD(0.01",
            REDUCED: "",
            GRADIENTS: f"""{GRADIENTS}    gradients = [
        hvd.allreduce(tf.convert_to_tensor(each), op=hvd.Sum) for each in gradients
    ]
""",
        },
        "by hvd.allreduce with op=hvd.Sum, which is 2 times their mean",
    ),
    "a second compile": (
        FIT,
        {
            "size = 16": "size = 64",
            "epochs=2, callbacks=callbacks, verbose=0)": """callbacks=callbacks)
model.compile(keras.optimizers.SGD(0.01), loss="mse")
model.fit(x, y, size, verbose=0)""",
        },
        "The gradients of the optimizer sgd are not reduced over the ranks, others are",
    ),
    "a decision by a local metric": (
        FIT,
        {
            "Callback(0)]": "Callback(0), keras.callbacks.EarlyStopping()]",
            "verbose=0": "validation_data=(x, y), verbose=0",
        },
        "val_loss, by which a callback decides, differs by rank: ",
    ),
    "class weights of a shard": (
        FIT,
        {
            "keepdims=True)": "keepdims=True) > 0",
            "Dense(1)": 'Dense(1, "sigmoid")',
            '"mse"': '"binary_crossentropy"',
            "verbose=0": "class_weight={0: 1.0, 1: 2.0 + hvd.rank()}, verbose=0",
        },
        "class_weight differs by rank: 0: 1, 1: 2 and 0: 1, 1: 3.",
    ),
    "seeds of all ranks": (
        LOOP,
        {
            "hvd.init()": "hvd.init()\nkeras.utils.set_random_seed(7)",
            "[embedding, pool, ": "[embedding, pool, keras.layers.Dropout(0.5), ",
            "(model.variables": "(model.weights",
        },
        "The seeds of dropout are equal on several ranks",
    ),
    "moments of a shard": (
        FIT,
        {
            "size = 16": "norm = keras.layers.Normalization()\nnorm.adapt(x)\n"
            "x, size = keras.ops.convert_to_numpy(norm(x)), 16"
        },
        "The ranks differ in the mean of the layer normalization",
    ),
    "one file of all ranks": (
        LOOP,
        {"    step(x, y)": '    step(x, y)\n    model.save("model.keras")'},
        "Several ranks write model.keras: write a file on rank 0",
    ),
    "clipping in train_step": (
        TRAIN_STEP,
        {"        self.opt": f"        gradients = {CLIP}\n        self.opt"},
        "The script clips gradients before they are reduced",
    ),
    "clipping in a loop": (
        LOOP,
        {
            REDUCED: "",
            GRADIENTS: f"{GRADIENTS}    gradients = {CLIP}\n"
            "    gradients = [hvd.allreduce(each) for each in gradients]\n",
        },
        "The script clips gradients before they are reduced",
    ),
    "a tape of two": (
        TWO_MODELS,
        {f"{REDUCED}{OTHER}": OTHER},
        "are not reduced over the ranks, others are",
    ),
    "a multiple of the loss": (
        FIT,
        {'loss="mse"': "loss=lambda y, p: hvd.size() * (y - p) ** 2"},
        "The gradients are 2 times those of one process",
    ),
    "a fraction of the loss": (
        LOOP,
        {LOSS: f"{LOSS} / hvd.size()"},
        "The gradients are 0.5 times those of one process",
    ),
    "a constant of the rank": (
        FIT,
        {'loss="mse"': "loss=lambda y, p: (0.5 + hvd.rank()) * keras.ops.abs(y - p)"},
        "is 0.5 and 1.5. Make it the same on all ranks",
    ),
    "random constants": (
        LOOP,
        {
            "@tf.function": "weight = np.random.uniform()\n\n\n@tf.function",
            LOSS: f"weight * {LOSS}",
        },
        "gradients differ by rank: a constant of the step",
    ),
    "a shuffle before the shard": (
        DISTINCT,
        {SHARD: SHUFFLED},
        "sharded after a shuffle whose order is another one on each rank",
    ),
    "frozen weights": (
        LOOP,
        {
            "optimizer =": "embedding.trainable = False\noptimizer =",
            "(model.variables": "(model.trainable_variables",
        },
        "embeddings is not trained, and not equal on all ranks",
    ),
    "another optimizer": (
        FIT,
        {"optimizer = hvd": "other = hvd", "r(optimizer)": "r(keras.optimizers.SGD())"},
        "The optimizer is not distributed, so that the ranks would train",
    ),
    "the mean of the loss": (
        LOOP,
        {REDUCED: "", LOSS: f"hvd.allreduce({LOSS})"},
        "No gradient is reduced",
    ),
    "a contrast of samples": (
        LOOP,
        {LOSS: "tf.reduce_mean(tf.nn.log_softmax(model(x), axis=0) * y)"},
        "a loss or a layer that combines the samples of a batch",
    ),
    "settings of each rank": (
        LOOP,
        {"Adam(0.01": "SGD(clipnorm=0.01 / (1 + hvd.rank()), learning_rate=0.1"},
        "give the optimizer the same arguments on all ranks",
    ),
    "valid samples": (
        LOOP,
        {
            f"        loss = {LOSS}": """
        valid = tf.cast(x[:, :1] > 1, tf.float32)
        error = (y - model(x, training=True)) ** 2
        loss = tf.reduce_sum(valid * error) / tf.reduce_sum(valid)"""
        },
        "divides by the number of valid ones",
    ),
}
