"""Scripts that are right, and scripts with one fault each, for a verification."""

FIT = """
import keras
import numpy as np

import hvdtrain.keras as hvd

hvd.init()
x = np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]
size = 16
dense = keras.layers.Dense(16, "relu")
middle = keras.layers.Dropout(0.5)
model = keras.Sequential([keras.Input((8,)), dense, middle, keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer, loss="mse", metrics=["mae"])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(x, y, size, epochs=2, callbacks=callbacks, verbose=0)
"""

LOOP = """
import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd

hvd.init()
ids = np.random.default_rng(0).integers(1, 4, size=(640, 6))
labels = (ids.sum(axis=1) % 2).astype("float32")[:, None]
data = tf.data.Dataset.from_tensor_slices((ids, labels))
data = data.shard(hvd.size(), hvd.rank()).batch(16, drop_remainder=True)
embedding = keras.layers.Embedding(4, 8)
pool = keras.layers.GlobalAveragePooling1D()
model = keras.Sequential([embedding, pool, keras.layers.Dense(1)])
model.build((None, 6))
optimizer = keras.optimizers.Adam(0.01 * hvd.size())
loss_of = keras.losses.BinaryCrossentropy(from_logits=True)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return hvd.allreduce(loss)


hvd.broadcast_variables(model.variables, root_rank=0)
for x, y in data:
    step(x, y)
"""

ON_BATCH = (
    FIT[: FIT.index("callbacks =")]
    + """
hvd.broadcast_variables(model.variables, root_rank=0)
for start in range(0, len(x), size):
    model.train_on_batch(x[start : start + size], y[start : start + size])
"""
)

MASKED = """
import keras
import numpy as np

import hvdtrain.keras as hvd

hvd.init()
ids = np.random.default_rng(hvd.rank()).integers(1, 4, size=(320, 6))
labels = ids[..., None] ** 2.0
# Of six steps, so many are no padding.
steps = 5
ids[:, steps:] = 0
layers = [keras.layers.Embedding(4, 8, mask_zero=True), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(ids, labels, 16, callbacks=callbacks, verbose=0)
"""

SHARDED = "x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]"
# Every rank validates with the same samples, and rank 0 evaluates alone before.
EVALUATED = FIT.replace(SHARDED, f"test = x[:32], y[:32]\n{SHARDED}").replace(
    "model.fit(x, y, size, epochs=2,",
    """
if hvd.rank() == 0:
    model.evaluate(*test, verbose=0)
model.fit(x[:64], y[:64], size, epochs=3, validation_data=test,""",
)
GENERATED = FIT.replace(
    "model.fit(x, y, size, epochs=2,",
    """
def generate():
    for start in range(0, len(x), size):
        yield {"a": x[start : start + size]}, y[start : start + size]

a = keras.Input((8,), name="a")
model = keras.Model({"a": a}, keras.layers.Dense(1)(dense(a)))
model.compile(optimizer, loss="mse")
model.fit(generate(),""",
)
# A model, and a copy that is updated after each step and gives the targets.
TWO_MODELS = (
    LOOP.replace(
        "loss_of = ",
        """target = keras.models.clone_model(model)
target.build((None, 6))
other = keras.optimizers.Adam(0.01 * hvd.size())
loss_of = """,
    )
    .replace(
        "    return hvd.allreduce(loss)",
        """    with tf.GradientTape() as tape:
        loss = keras.ops.mean((model(x) - target(x, training=True)) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, target.trainable_variables)
    other.apply_gradients(zip(gradients, target.trainable_variables))""",
    )
    .replace(
        "for x, y in data:\n    step(x, y)",
        """hvd.broadcast_variables(target.variables, root_rank=0)
test = tf.data.Dataset.from_tensor_slices((ids[:64], labels[:64])).batch(32)
for epoch in range(3):
    for x, y in data.take(4):
        step(x, y)
    for x, y in test:
        model(x)
raise SystemExit(0)""",
    )
)
ACCUMULATED = FIT.replace(
    "(optimizer)", "(optimizer, backward_passes_per_step=6)"
).replace("keras.layers.Dropout(0.5)", "keras.layers.GaussianNoise(0.1)")
# A rate that is warmed up by samples, and a metric that is no sum.
WARMED_UP = FIT.replace(
    "Adam(0.01 * hvd.size())",
    "SGD(keras.optimizers.schedules.CosineDecay(0.0, 100, "
    "warmup_target=0.01 * hvd.size(), warmup_steps=16 // hvd.size()))",
).replace(
    'model.compile(optimizer, loss="mse", metrics=["mae"])',
    """
class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        largest = keras.ops.max(keras.ops.abs(y_pred))
        self.value.assign(keras.ops.maximum(self.value, largest))

    def result(self):
        return self.value


model.compile(optimizer, loss="mse", metrics=[Largest()])""",
)

# The name of a fault: the script, what is replaced in it, and what names the fault.
FAULTS = {
    "no reduction": (
        LOOP,
        {"    tape = hvd.DistributedGradientTape(tape)\n": ""},
        "No gradient is reduced",
    ),
    "no broadcast": (
        FIT,
        {"[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]": "[]"},
        "BroadcastGlobalVariablesCallback",
    ),
    "unequal batches": (
        FIT,
        {
            "size = 16": "size = 24 - 8 * hvd.rank()",
            "model.fit(x, y,": "model.fit(x[: 10 * size], y[: 10 * size],",
        },
        "24 and 16 samples",
    ),
    "broadcast after the first step": (
        LOOP,
        {
            "model.build((None, 6))\n": "",
            "hvd.broadcast_variables(model.variables, root_rank=0)\nfor": "for",
            "    step(x, y)": "    step(x, y)\n"
            "    hvd.broadcast_variables(model.variables, root_rank=0)\n"
            "    hvd.broadcast_variables(optimizer.variables, root_rank=0)",
        },
        "their first gradients with different weights",
    ),
    "a sum that is divided": (
        LOOP,
        {
            "    tape = hvd.DistributedGradientTape(tape)\n": "",
            "model.trainable_variables)\n    optimizer": "model.trainable_variables)\n"
            "    gradients = [\n"
            "        hvd.allreduce(tf.convert_to_tensor(each), op=hvd.Sum) / 2\n"
            "        for each in gradients\n"
            "    ]\n"
            "    optimizer",
        },
        "The script calls hvd.allreduce itself",
    ),
    "sum of losses": (
        FIT,
        {'"mse"': 'keras.losses.MeanSquaredError(reduction="sum")'},
        'reduction="sum" or None, and the mean over ranks is 1 / 2',
    ),
    "sum of means": (
        FIT,
        {"(optimizer)": "(optimizer, op=hvd.Sum)"},
        "added up by op=hvd.Sum",
    ),
    "vocabularies": (
        LOOP,
        {
            "Sequential([": "Sequential([keras.layers.IntegerLookup("
            "vocabulary=[[1, 2, 3], [3, 2, 1]][hvd.rank()]), ",
        },
        "The ranks differ in the vocabulary of the layer integer_lookup",
    ),
    "sum of penalties": (
        LOOP,
        {
            "Embedding(4, 8)": 'Embedding(4, 8, embeddings_regularizer="l2")',
            "from_logits=True": 'from_logits=True, reduction="sum"',
            "training=True))": "training=True)) + sum(model.losses)",
            "Tape(tape)": "Tape(tape, op=hvd.Sum)",
        },
        "embedding adds a regularizer",
    ),
    "loss of a batch": (
        FIT,
        {
            "keepdims=True)": "keepdims=True) > 0",
            "Dense(1)": 'Dense(1, "sigmoid")',
            '"mse"': "keras.losses.Dice()",
        },
        "dice of a batch is no mean over its samples",
    ),
    "weights of samples": (
        FIT,
        {
            '"mse"': "keras.losses.MeanSquaredError('mean_with_sample_weight')",
            "size = 16": "size, weights = 16, 1 - 0.9 * hvd.rank() * (x[:, 0] > 0)",
            "verbose=0": "sample_weight=weights, verbose=0",
        },
        "own sum of weights",
    ),
    "rate scaled twice": (
        FIT,
        {"0.01 * hvd.size()": "0.01 * hvd.size() * hvd.size()"},
        "it is scaled twice",
    ),
    "rate of one rank": (
        FIT,
        {
            "callbacks = [": "rates = [0.02, 0.02, 0.02 / (1 + hvd.rank())]\n"
            "set_rate = lambda batch, logs: setattr(\n"
            "    model.optimizer, 'learning_rate', rates[min(batch, 2)]\n"
            ")\n"
            "set_rate = keras.callbacks.LambdaCallback(on_train_batch_begin=set_rate)\n"
            "callbacks = [set_rate, "
        },
        "differs by rank",
    ),
    "local moments": (
        FIT,
        {"keras.layers.Dropout(0.5)": "keras.layers.BatchNormalization()"},
        "use hvd.SyncBatchNormalization",
    ),
    "random numbers": (
        FIT,
        {
            "middle = keras.layers.Dropout(0.5)": """

class Shift(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + keras.random.normal((1, 16), seed=self.seed_generator)


middle = Shift()
"""
        },
        "shift draws random numbers",
    ),
    "data of all ranks": (
        FIT,
        {
            "x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]": "",
            "size, epochs": "size, shuffle=False, epochs",
        },
        "read the same batch: shard the data",
    ),
    "masks": (MASKED, {"steps = 5": "steps = 5 - 3 * hvd.rank()"}, "makes masks"),
    "dense rows": (
        LOOP,
        {"Tape(tape)": "Tape(tape, sparse_as_dense=True)"},
        "sparse_as_dense=True adds up",
    ),
    "compression": (
        FIT,
        {"(optimizer)": "(optimizer, compression=hvd.Compression.fp16)"},
        "rounded by FP16Compressor",
    ),
}
# The name, the script, and a part of the only line that is printed as an error.
REFUSED = {
    "slices of arrays": (
        LOOP.replace(
            "for x, y in data:", "for x, y in [(ids[:16], labels[:16])] * 20:"
        ),
        "Received 20 steps of an optimizer with batches that cannot be seen",
    ),
    "a loop in a function": (
        LOOP.replace(
            "for x, y in data:\n    step(x, y)",
            """
@tf.function
def train(data):
    for x, y in data:
        step(x, y)


model(next(iter(data))[0])
train(data)""",
        ),
        "batches that cannot be seen",
    ),
    "a regularizer under a sum": (
        FIT.replace("(optimizer)", "(optimizer, op=hvd.Sum)").replace(
            'Dense(16, "relu")', 'Dense(16, "relu", kernel_regularizer="l2")'
        ),
        "op=hvd.Sum would multiply the losses of regularizers",
    ),
    "unequal steps": (
        LOOP.replace("in data:", "in data.take(5 - hvd.rank()):"),
        "Rank 1 has ended after 4 steps, and rank 0 in step 5: give all ranks equally",
    ),
    "an error of a program": (
        """
from hvdtrain import job, program


def main():
    job.start(seed=1)
    raise job.JobError("Received no data in /data; expected TFRecords.")


program.run(main, page="A page.")
""",
        "The script failed: Received no data in /data; expected TFRecords. Its output",
    ),
    "an error of one rank": (
        LOOP.replace(
            "for x, y in data:",
            "if hvd.rank() == 1:\n    open('missing')\nfor x, y in data:",
        ),
        "The script failed: FileNotFoundError: [Errno 2] No such file or directory: "
        "'missing'",
    ),
    "sharded state": (
        FIT.replace("(optimizer)", "(optimizer, shard_state=True)"),
        "Received shard_state=True; expected False",
    ),
    "lengths of each rank": (
        LOOP.replace(
            "ids, labels))",
            "ids[:, : 6 - hvd.rank()], labels))",
        ),
        "expected shapes that differ in the first number only",
    ),
    "Horovod's own optimizer": (
        FIT.replace(
            "import hvdtrain.keras as hvd", "import horovod.tensorflow.keras as hvd"
        ),
        "Received an optimizer or a tape of horovod",
    ),
}
CLEAN = {
    "fit": FIT,
    "loop": LOOP,
    "evaluations": EVALUATED,
    "a generator": GENERATED,
    "two models": TWO_MODELS,
    "accumulation": ACCUMULATED,
    "warm-up": WARMED_UP,
    "train_on_batch": ON_BATCH,
    "moments of all ranks": FIT.replace(
        "keras.layers.Dropout(0.5)", "hvd.SyncBatchNormalization()"
    ),
    "sum of losses": FIT.replace(
        '"mse"', 'keras.losses.MeanSquaredError(reduction="sum")'
    ).replace("(optimizer)", "(optimizer, op=hvd.Sum)"),
    "loss of all batches": FIT.replace("keepdims=True)", "keepdims=True) > 0")
    .replace("Dense(1)", 'Dense(1, "sigmoid")')
    .replace(
        '"mse"', "lambda y, p: keras.losses.dice(hvd.allgather(y), hvd.allgather(p))"
    ),
    "masks": MASKED,
    "mixed precision": FIT.replace(
        "hvd.init()", 'hvd.init()\nkeras.config.set_dtype_policy("mixed_bfloat16")'
    ),
}
