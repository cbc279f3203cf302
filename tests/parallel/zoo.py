"""Small models with weights of every kind, and samples for them.

The batch of all ranks has 12 samples, for 2, 3 and 4 ranks. Models have random weights
of one seed. A model with embeddings has ids that repeat within a batch.
"""

import keras
import numpy as np

from hvdtrain import parallel

layers = keras.layers

STEPS = 3
GLOBAL_BATCH_SIZE = 12
COUNT = STEPS * GLOBAL_BATCH_SIZE
FEATURES, LENGTH, WIDTH = 5, 4, 6
VOCABULARY, CLASSES = 11, 3
RNG = np.random.default_rng(0)

VECTORS = RNG.normal(size=(COUNT, FEATURES))
SERIES = RNG.normal(size=(COUNT, LENGTH, FEATURES))
IMAGES = RNG.normal(size=(COUNT, 6, 6, 2))
TOKENS = RNG.integers(0, VOCABULARY, (COUNT, LENGTH))
LABELS = RNG.integers(0, CLASSES, COUNT)


def classify(inputs, features):
    """A functional model with logits of the classes."""
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(features))


def dense():
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dense(17, "tanh", name="first")(inputs)
    return classify(inputs, layers.Dense(8, "gelu", name="second")(hidden))


def odd():
    """Sizes that are not divisible, and fewer elements than ranks."""
    inputs = keras.Input((FEATURES,))
    x = layers.Dense(1, name="one")(inputs)
    x = layers.concatenate([x, layers.Dense(7, use_bias=False)(inputs)])
    return classify(inputs, layers.Dense(13, "tanh")(x))


def embedding():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(inputs)
    return classify(inputs, layers.Dense(8, "tanh")(layers.Flatten()(x)))


class ReversibleEmbedding(layers.Embedding):
    """Computes logits by its transposed table, if `reverse`."""

    def call(self, inputs, reverse=False):
        if reverse:
            table = keras.ops.transpose(self.embeddings)
            return keras.ops.matmul(inputs, table)
        return super().call(inputs)

    def compute_output_spec(self, inputs, reverse=False):
        """As keras_hub's."""
        size = self.input_dim if reverse else self.output_dim
        shape = inputs.shape[:-1] if reverse else inputs.shape
        return keras.KerasTensor((*shape, size), dtype=self.compute_dtype)


def tied():
    inputs = keras.Input((LENGTH,), dtype="int32")
    table = ReversibleEmbedding(VOCABULARY, WIDTH)
    hidden = layers.Dense(WIDTH, "tanh")(table(inputs))
    return keras.Model(inputs, table(hidden, reverse=True))


class Logits(layers.Layer):
    """Computes logits by the table of another layer."""

    def __init__(self, table, **options):
        super().__init__(**options)
        self.table = table

    def call(self, inputs):
        return keras.ops.matmul(inputs, keras.ops.transpose(self.table.embeddings))


def tied_by_reference():
    inputs = keras.Input((LENGTH,), dtype="int32")
    table = layers.Embedding(VOCABULARY, WIDTH)
    hidden = layers.Dense(WIDTH, "tanh")(table(inputs))
    return keras.Model(inputs, Logits(table)(hidden))


class LanguageModel(keras.Model):
    """Computes logits by the table of its embedding, outside of the layer's call."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(VOCABULARY, WIDTH)
        self.block = layers.Dense(WIDTH, "tanh")

    def call(self, inputs):
        hidden = self.block(self.table(inputs))
        return keras.ops.matmul(hidden, keras.ops.transpose(self.table.embeddings))


def tied_in_model():
    model = LanguageModel()
    model(np.zeros((2, LENGTH)))
    return model


def masked():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(inputs)
    x = layers.TimeDistributed(layers.Dense(5, "tanh"))(x)
    x = layers.LSTM(4)(x)
    return classify(inputs, x)


def masked_average():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(inputs)
    x = layers.Dense(WIDTH, "tanh")(x)
    return classify(inputs, layers.GlobalAveragePooling1D()(x))


def layer_norm():
    inputs = keras.Input((FEATURES,))
    x = layers.LayerNormalization()(layers.Dense(17)(inputs))
    x = layers.RMSNormalization()(layers.Dense(16, "gelu")(x))
    x = layers.GroupNormalization(4)(x)
    return classify(inputs, layers.PReLU()(x))


def normalized(make=layers.BatchNormalization, **options):
    inputs = keras.Input((FEATURES,))
    x = make(momentum=0.5, **options)(layers.Dense(17)(inputs))
    return classify(inputs, layers.Activation("tanh")(x))


def frozen_normalized():
    return normalized(trainable=False)


def attention(dropout=0.0):
    inputs = keras.Input((LENGTH, FEATURES))
    x = layers.Dense(WIDTH)(inputs)
    attend = layers.MultiHeadAttention(2, 3, dropout=dropout)
    x = layers.LayerNormalization()(x + attend(x, x, use_causal_mask=True))
    x = x + layers.GroupQueryAttention(3, 4, 1)(x, x)
    return classify(inputs, layers.Dropout(dropout)(layers.Flatten()(x)))


def attention_with_dropout():
    return attention(dropout=0.4)


def attention_with_mask():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(inputs)
    x = layers.MultiHeadAttention(2, 3)(x, x)
    return classify(inputs, layers.GlobalAveragePooling1D()(x))


def convolution():
    inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(5, 3, activation="relu")(inputs)
    x = layers.DepthwiseConv2D(2)(x)
    x = layers.SeparableConv2D(4, 2, padding="same")(x)
    x = layers.Conv2DTranspose(3, 2)(x)
    return classify(inputs, layers.Flatten()(x))


def recurrent():
    inputs = keras.Input((LENGTH, FEATURES))
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(inputs)
    x = layers.GRU(5, return_sequences=True)(x)
    return classify(inputs, layers.SimpleRNN(4)(x))


def stacked_cells():
    inputs = keras.Input((LENGTH, FEATURES))
    cells = [layers.LSTMCell(4), layers.GRUCell(5)]
    x = layers.RNN(cells, return_sequences=True)(inputs)
    return classify(inputs, layers.RNN(layers.SimpleRNNCell(4))(x))


def distributed_over_time():
    inputs = keras.Input((LENGTH, FEATURES))
    block = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(6)])
    x = layers.TimeDistributed(block)(inputs)
    return classify(inputs, layers.Flatten()(x))


def nested():
    inner = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, "tanh")])
    outer_inputs = keras.Input((FEATURES,))
    x = layers.Dense(9, "tanh")(inner(outer_inputs))
    outer = keras.Model(outer_inputs, x + layers.Dense(9)(outer_inputs))
    inputs = keras.Input((FEATURES,))
    return classify(inputs, outer(inputs))


def shared():
    """A layer and a model that are called twice."""
    inputs = keras.Input((FEATURES,))
    first = layers.Dense(FEATURES, "tanh")
    block = keras.Sequential([layers.Dense(7, "tanh"), layers.Dense(FEATURES)])
    return classify(inputs, block(first(block(first(inputs)))))


class Residual(layers.Layer):
    """Has weights of its own, and layers inside."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="random_normal")
        self.mixing = self.add_weight(
            shape=(shape[-1], shape[-1]), initializer="random_normal", name="mixing"
        )
        self.inside = layers.Dense(shape[-1], "tanh")
        self.inside.build(shape)

    def call(self, inputs):
        mixed = keras.ops.matmul(self.inside(inputs), self.mixing)
        return inputs + mixed * (1.0 + self.scale)


def residual():
    inputs = keras.Input((FEATURES,))
    x = layers.Dense(WIDTH)(inputs)
    return classify(inputs, Residual()(Residual()(x)))


class Subclassed(keras.Model):
    """A model with weights of its own."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(8, "tanh")
        self.block = Residual()
        self.head = layers.Dense(CLASSES)
        self.shift = self.add_weight(
            shape=(20,), initializer="random_normal", name="shift"
        )

    def call(self, inputs, training=False):
        x = self.block(self.first(inputs)) + self.shift[:8]
        return self.head(x) + keras.ops.mean(self.shift)


def subclassed():
    model = Subclassed()
    model(np.zeros((2, FEATURES)))
    return model


def frozen_backbone():
    inputs = keras.Input((FEATURES,))
    backbone = keras.Sequential([layers.Dense(9, "tanh"), layers.Dense(8, "tanh")])
    backbone.trainable = False
    x = layers.Dense(7, "tanh")(backbone(layers.Dense(FEATURES)(inputs)))
    return classify(inputs, x)


def lora():
    model = embedding()
    for layer in model.layers:
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
            # Zeros, so that the other factor would not be trained in the first step.
            factor = layer.trainable_weights[-1]
            factor.assign(0.1 * np.ones(factor.shape))
    return model


def regularized():
    inputs = keras.Input((FEATURES,))
    x = layers.Dense(9, "tanh", kernel_regularizer="l2", bias_regularizer="l1")(inputs)
    x = layers.Dense(8, "tanh", activity_regularizer="l2")(x)
    x = layers.ActivityRegularization(l2=0.1)(x)
    return classify(
        inputs,
        layers.Dense(7, kernel_regularizer=keras.regularizers.L1L2(0.01, 0.1))(x),
    )


class WithLoss(layers.Dense):
    """A Dense that adds a loss in its call."""

    def call(self, inputs):
        outputs = super().call(inputs)
        self.add_loss(0.1 * keras.ops.mean(outputs**2))
        return outputs


def with_loss():
    inputs = keras.Input((FEATURES,))
    return classify(inputs, WithLoss(9, "tanh")(WithLoss(8, "tanh")(inputs)))


def constrained():
    inputs = keras.Input((FEATURES,))
    x = layers.Dense(9, "tanh", kernel_constraint="unit_norm")(inputs)
    return classify(inputs, layers.Dense(8, "tanh", bias_constraint="non_neg")(x))


def several():
    """Several inputs and outputs, in dicts."""
    inputs = {"a": keras.Input((FEATURES,)), "b": keras.Input((LENGTH, FEATURES))}
    a = layers.Dense(8, "tanh")(inputs["a"])
    b = layers.Dense(8, "tanh")(layers.Flatten()(inputs["b"]))
    both = layers.Bilinear()([a, b]) if hasattr(layers, "Bilinear") else a * b
    outputs = {
        "sum": layers.Dense(CLASSES, name="sum")(both),
        "b": layers.Dense(CLASSES, name="b")(b),
    }
    return keras.Model(inputs, outputs)


class Pair(layers.Layer):
    """Takes and returns dicts and positional and keyword tensors."""

    def build(self, shape, **shapes):
        self.first = self.add_weight(shape=(FEATURES, 8), name="first")
        self.second = self.add_weight(shape=(FEATURES, 8), name="second")

    def call(self, inputs, other=None, factor=1.0):
        x = keras.ops.matmul(inputs["x"], self.first)
        return {"x": x * factor, "y": [x + keras.ops.matmul(other, self.second)]}


def nests():
    inputs = keras.Input((FEATURES,))
    other = layers.Dense(FEATURES, "tanh")(inputs)
    found = Pair()({"x": inputs}, other=other, factor=0.5)
    return classify(inputs, found["x"] * found["y"][0])


def remat_before():
    inputs = keras.Input((FEATURES,))
    block = keras.Sequential([layers.Dense(9, "tanh"), layers.Dense(8, "tanh")])
    x = parallel.remat(block)(inputs)
    return classify(inputs, x)


def others():
    """Further layers with weights."""
    inputs = keras.Input((LENGTH, FEATURES))
    x = layers.Conv1D(6, 2, padding="same", activation="relu")(inputs)
    x = layers.EinsumDense("btf,fg->btg", output_shape=(LENGTH, 7))(x)
    x = layers.SpectralNormalization(layers.Dense(6))(x)
    x = layers.AdditiveAttention()([x, x])
    return classify(inputs, layers.Flatten()(x))


SAMPLES = {
    **dict.fromkeys((embedding, tied, tied_by_reference, masked), TOKENS),
    tied_in_model: TOKENS,
    **dict.fromkeys((masked_average, attention_with_mask, lora), TOKENS),
    **dict.fromkeys((attention, attention_with_dropout, recurrent), SERIES),
    **dict.fromkeys((stacked_cells, distributed_over_time, others), SERIES),
    convolution: IMAGES,
    several: {"a": VECTORS, "b": SERIES},
}
TARGETS = {
    **dict.fromkeys(
        (tied, tied_by_reference, tied_in_model), np.roll(TOKENS, -1, axis=1)
    ),
    several: {"sum": LABELS, "b": LABELS[::-1].copy()},
}


def samples(make):
    """All inputs of a model, and its targets."""
    return SAMPLES.get(make, VECTORS), TARGETS.get(make, LABELS)
