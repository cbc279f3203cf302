"""A row for each public class of Keras: arguments, and what several ranks compute.

A name may have a word behind it, `BatchNormalization synchronized`, for another row of
the class. A row has arguments, or a function that makes the object. `NOT_ROWS` names
classes without a row, with the reason. Rows that are not in `WARNED`, `RANDOM` or
`OF_BATCHES` compute on several ranks what one process computes.
"""

import inspect
import tempfile
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers

GLOBAL_BATCH_SIZE = 12
COUNT = 2 * GLOBAL_BATCH_SIZE


class Inputs(NamedTuple):
    """The inputs of a layer.

    Attributes:
        shape: of a sample.
        draw: function of a generator and a shape.
        number: how many tensors the layer takes.
        is_hidden: whether the layer gets the outputs of a layer with weights.
        floatx: "float32" for layers that raise an error in float64.
    """

    shape: tuple
    draw: object = np.random.Generator.normal
    number: int = 1
    is_hidden: bool = True
    floatx: str = "float64"

    def samples(self):
        rng = np.random.default_rng(0)
        shape = COUNT, *self.shape
        arrays = [self.draw(rng, size=shape) for _ in range(self.number)]
        return arrays if self.number > 1 else arrays[0]


def draw_ids(rng, size):
    return rng.integers(0, 11, size)


def draw_words(rng, size):
    return tf.constant(np.array(["a", "b", "c", "d"])[rng.integers(0, 4, size)])


VECTORS = Inputs((6,))
SERIES = Inputs((4, 6))
IMAGES = Inputs((4, 4, 3))
VOLUMES = Inputs((4, 4, 4, 2))
FRAMES = Inputs((2, 3, 3, 2))
CLIPS = Inputs((2, 3, 3, 3, 1))
PAIRS = Inputs((4, 6), number=2)
IDS = Inputs((4,), draw_ids, is_hidden=False)
PAIRS_OF_IDS = Inputs((1,), draw_ids, number=2, is_hidden=False)
WORDS = Inputs((4,), draw_words, is_hidden=False)
SOUNDS = Inputs((64,), is_hidden=False)
PHOTOS = Inputs((8, 8, 3), np.random.Generator.uniform, is_hidden=False)
OF_PHOTOS = {"value_range": (0, 1)}
# TensorFlow has no float64 of some operations.
SINGLE = {"dtype": "float32"}


def square(x):
    return x**2


def saved_model():
    """Export a model, and return a layer that calls it."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
    with tempfile.TemporaryDirectory() as folder:
        model.export(folder, verbose=False)
        return layers.TFSMLayer(folder, call_endpoint="serve")


def decibels(top_db):
    return keras.Sequential(
        [
            layers.MelSpectrogram(16, 8, top_db=top_db, **SINGLE),
            layers.Rescaling(0.01),
        ]
    )


def boxes_of(x):
    """Return the boxes of a layer that gets images, boxes and labels."""
    boxes = {"boxes": x, "labels": x[..., 0]}
    samples = {"images": x[..., None], "bounding_boxes": boxes}
    layer = layers.MaxNumBoundingBoxes(5, bounding_box_format="xyxy")
    return layer(samples)["bounding_boxes"]["boxes"]


LAYERS = {
    VECTORS: {
        "Activation": {"activation": "gelu"},
        "ActivityRegularization": {"l1": 0.1, "l2": 0.1},
        "AlphaDropout": {"rate": 0.4},
        "BatchNormalization": {},
        "BatchNormalization synchronized": {"synchronized": True},
        "Dense": {"units": 4},
        "Discretization": {"bin_boundaries": [-1.0, 0.0, 1.0]},
        "Dropout": {"rate": 0.4},
        "ELU": {},
        "GaussianDropout": {"rate": 0.4},
        "GaussianNoise": {"stddev": 0.4},
        "GroupNormalization": {"groups": 3},
        "Identity": {},
        "Lambda": {"function": square},
        "LayerNormalization": {},
        "LeakyReLU": {},
        "Normalization": {"mean": 0.5, "variance": 2.0},
        "PReLU": {"alpha_initializer": "ones"},
        "Pipeline": lambda: layers.Pipeline([layers.Rescaling(0.5)]),
        "RMSNormalization": {},
        "ReLU": {},
        "RepeatVector": {"n": 2},
        "Rescaling": {"scale": 0.5},
        "Softmax": {},
        "SpectralNormalization": lambda: layers.SpectralNormalization(layers.Dense(4)),
        "TFSMLayer": saved_model,
        "UnitNormalization": {},
    },
    SERIES: {
        "AdaptiveAveragePooling1D": {"output_size": 2},
        "AdaptiveMaxPooling1D": {"output_size": 2},
        "AveragePooling1D": {"pool_size": 2},
        "Bidirectional": lambda: layers.Bidirectional(layers.LSTM(3)),
        "Conv1D": {"filters": 3, "kernel_size": 2},
        "Conv1DTranspose": {"filters": 3, "kernel_size": 2},
        "Cropping1D": {},
        "DepthwiseConv1D": {"kernel_size": 2},
        "EinsumDense": {"equation": "btf,fg->btg", "output_shape": (4, 4)},
        "Flatten": {},
        "GRU": {"units": 3},
        "GRUCell": lambda: layers.RNN(layers.GRUCell(3)),
        "GlobalAveragePooling1D": {},
        "GlobalMaxPooling1D": {},
        "LSTM": {"units": 3},
        "LSTM dropout": {"units": 3, "dropout": 0.4, "recurrent_dropout": 0.4},
        "LSTMCell": lambda: layers.RNN(layers.LSTMCell(3)),
        "Masking": {},
        "MaxPooling1D": {"pool_size": 2},
        "Permute": {"dims": (2, 1)},
        "RNN": lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)]),
        "Reshape": {"target_shape": (3, 8)},
        "SeparableConv1D": {"filters": 3, "kernel_size": 2},
        "SimpleRNN": {"units": 3},
        "SimpleRNNCell": lambda: layers.RNN(layers.SimpleRNNCell(3)),
        "SpatialDropout1D": {"rate": 0.4},
        "StackedRNNCells": lambda: layers.RNN(
            layers.StackedRNNCells([layers.GRUCell(3), layers.SimpleRNNCell(2)])
        ),
        "TimeDistributed": lambda: layers.TimeDistributed(layers.Dense(3)),
        "UpSampling1D": {},
        "ZeroPadding1D": {},
    },
    IMAGES: {
        "AdaptiveAveragePooling2D": {"output_size": 2},
        "AdaptiveMaxPooling2D": {"output_size": 2},
        "AveragePooling2D": {"pool_size": 2},
        "Conv2D": {"filters": 3, "kernel_size": 2},
        "Conv2DTranspose": {"filters": 3, "kernel_size": 2},
        "Cropping2D": {},
        "DepthwiseConv2D": {"kernel_size": 2},
        "GlobalAveragePooling2D": {},
        "GlobalMaxPooling2D": {},
        "MaxPooling2D": {"pool_size": 2},
        "SeparableConv2D": {"filters": 3, "kernel_size": 2},
        "SpatialDropout2D": {"rate": 0.4},
        "UpSampling2D": {},
        "ZeroPadding2D": {},
    },
    VOLUMES: {
        "AdaptiveAveragePooling3D": {"output_size": 2, **SINGLE},
        "AdaptiveMaxPooling3D": {"output_size": 2, **SINGLE},
        "AveragePooling3D": {"pool_size": 2, **SINGLE},
        "Conv3D": {"filters": 3, "kernel_size": 2},
        "Conv3DTranspose": {"filters": 3, "kernel_size": 2},
        "Cropping3D": {},
        "GlobalAveragePooling3D": {},
        "GlobalMaxPooling3D": {},
        "MaxPooling3D": {"pool_size": 2, **SINGLE},
        "SpatialDropout3D": {"rate": 0.4},
        "UpSampling3D": {},
        "ZeroPadding3D": {},
    },
    SERIES._replace(shape=(3, 4)): {"MaxNumBoundingBoxes": lambda: boxes_of},
    SERIES._replace(shape=(2, 3, 2)): {"ConvLSTM1D": {"filters": 2, "kernel_size": 2}},
    FRAMES: {"ConvLSTM2D": {"filters": 2, "kernel_size": 2}},
    CLIPS: {"ConvLSTM3D": {"filters": 2, "kernel_size": 2}},
    PAIRS: {
        "Add": {},
        "AdditiveAttention": {},
        "Attention": {"use_scale": True},
        "Average": {},
        "Concatenate": {},
        "Dot": {"axes": 2},
        "GroupQueryAttention": lambda: unpacked(layers.GroupQueryAttention(3, 4, 2)),
        "Maximum": {},
        "Minimum": {},
        "MultiHeadAttention": lambda: unpacked(layers.MultiHeadAttention(2, 3)),
        "MultiHeadAttention dropout": lambda: unpacked(
            layers.MultiHeadAttention(2, 3, dropout=0.4)
        ),
        "Multiply": {},
        "Subtract": {},
    },
    IDS: {
        "CategoryEncoding": {"num_tokens": 11},
        "Embedding": {"input_dim": 11, "output_dim": 3},
        "Hashing": {"num_bins": 5},
        "IntegerLookup": {"vocabulary": [3, 5, 7]},
        "ReversibleEmbedding": {"input_dim": 11, "output_dim": 3},
    },
    PAIRS_OF_IDS: {"HashedCrossing": {"num_bins": 5}},
    WORDS: {
        "StringLookup": {"vocabulary": ["a", "b"]},
        "TextVectorization": lambda: layers.TextVectorization(
            vocabulary=["a", "b"], split=None, output_sequence_length=1
        ),
    },
    SOUNDS: {
        # Decibels. By default they are at least the largest one of the batch less 80.
        "MelSpectrogram": lambda: decibels(80),
        "MelSpectrogram range": lambda: decibels(1e3),
    },
    SOUNDS._replace(shape=(64, 1)): {
        "STFTSpectrogram": {"frame_length": 16, "frame_step": 8, "window": None}
    },
    PHOTOS: {
        "AutoContrast": OF_PHOTOS,
        "CenterCrop": {"height": 4, "width": 4},
        "ContrastLimitedAdaptiveHistogramEqualization": {
            **OF_PHOTOS,
            "tile_grid_size": (2, 2),
        },
        "CutMix": {},
        "Equalization": OF_PHOTOS,
        "MixUp": {},
        "RandomBrightness": {"factor": 0.4, **OF_PHOTOS},
        "RandomColorDegeneration": {"factor": 0.4, **OF_PHOTOS},
        "RandomColorJitter": {"brightness_factor": 0.4, **OF_PHOTOS},
        "RandomContrast": {"factor": 0.4, **OF_PHOTOS},
        "RandomCrop": lambda: keras.Sequential(
            [layers.RandomCrop(4, 4), layers.GlobalAveragePooling2D()]
        ),
        "RandomElasticTransform": {"factor": 1.0, **OF_PHOTOS},
        "RandomErasing": {"factor": 1.0, **OF_PHOTOS},
        "RandomFlip": {},
        "RandomGaussianBlur": {"factor": 1.0, **OF_PHOTOS},
        "RandomGrayscale": {},
        "RandomHue": {"factor": 0.4, **OF_PHOTOS},
        "RandomInvert": OF_PHOTOS,
        "RandomPerspective": {},
        "RandomPosterization": {"factor": 2, **OF_PHOTOS},
        "RandomSaturation": {"factor": 0.4, **OF_PHOTOS},
        "RandomSharpness": {"factor": 0.4, **OF_PHOTOS},
        "RandomShear": {"x_factor": 0.4},
        "RandomTranslation": {"height_factor": 0.4, "width_factor": 0.4},
        "RandomZoom": {"height_factor": 0.4},
        "Resizing": {"height": 4, "width": 4},
        "Solarization": {"value_range": (0, 1), "threshold_factor": 0.4},
    },
    PHOTOS._replace(floatx="float32"): {
        "AugMix": OF_PHOTOS,
        "RandAugment": OF_PHOTOS,
        "RandomRotation": {"factor": 0.4},
    },
}


def unpacked(layer):
    """Return a function that calls a layer with tensors in place of their list."""
    return lambda tensors: layer(*tensors)


def binary(rng, count):
    scores = rng.uniform(0.05, 0.95, (count, 1))
    return rng.integers(0, 2, (count, 1)), scores


def one_hot(rng, count):
    # TensorFlow has no `in_top_k` of float64.
    scores = rng.uniform(size=(count, 4)).astype("float32")
    scores /= scores.sum(axis=1, keepdims=True)
    return np.eye(4)[rng.integers(0, 4, count)], scores


def sparse(rng, count):
    labels, scores = one_hot(rng, count)
    return labels.argmax(axis=1), scores


def classes(rng, count):
    return rng.integers(0, 4, count), rng.integers(0, 4, count)


def regression(rng, count):
    truth = rng.uniform(1, 2, (count, 3))
    return truth, truth + rng.normal(0, 0.3, (count, 3))


def values(rng, count):
    return rng.normal(size=count), rng.uniform(0.5, 2, count)


def phonemes(rng, count):
    return rng.integers(1, 5, (count, 2)), rng.normal(size=(count, 4, 5))


def directions(rng, count):
    return rng.integers(0, 2, count), rng.normal(size=(count, 3))


# What predicts the targets that a function draws.
HEADS = {
    binary: lambda: layers.Dense(1, "sigmoid"),
    one_hot: lambda: layers.Dense(4, "softmax"),
    sparse: lambda: layers.Dense(4, "softmax"),
    regression: lambda: layers.Dense(3, "softplus"),
    phonemes: lambda: keras.Sequential([layers.Dense(20), layers.Reshape((4, 5))]),
    directions: lambda: keras.Sequential([layers.Dense(3), layers.UnitNormalization()]),
}
LOSSES = {
    binary: {
        "BinaryCrossentropy": {},
        "BinaryFocalCrossentropy": {},
        "Dice": {},
        "Dice axis": {"axis": 1},
        "Hinge": {},
        "SquaredHinge": {},
        "Tversky": {},
        "Tversky axis": {"axis": 1},
    },
    one_hot: {
        "CategoricalCrossentropy": {},
        "CategoricalFocalCrossentropy": {},
        "CategoricalHinge": {},
        "KLDivergence": {},
    },
    sparse: {
        "CategoricalGeneralizedCrossEntropy": {},
        "SparseCategoricalCrossentropy": {},
    },
    regression: {
        "CosineSimilarity": {},
        "Huber": {},
        "LogCosh": {},
        "MeanAbsoluteError": {},
        "MeanAbsolutePercentageError": {},
        "MeanSquaredError": {},
        "MeanSquaredLogarithmicError": {},
        "Poisson": {},
    },
    phonemes: {"CTC": {}},
    directions: {"Circle": {}},
}
METRICS = {
    binary: {
        "AUC": {},
        "Precision": {},
        "Recall": {"thresholds": [0.3, 0.6]},
        "TruePositives": {},
        "TrueNegatives": {},
        "FalsePositives": {},
        "FalseNegatives": {},
        "BinaryAccuracy": {},
        "BinaryIoU": {"target_class_ids": [1]},
        "BinaryCrossentropy": {},
        "Hinge": {},
        "SquaredHinge": {},
        "PrecisionAtRecall": {"recall": 0.5},
        "RecallAtPrecision": {"precision": 0.5},
        "SensitivityAtSpecificity": {"specificity": 0.5},
        "SpecificityAtSensitivity": {"sensitivity": 0.5},
    },
    one_hot: {
        "AUC": {"multi_label": True, "num_labels": 4},
        "CategoricalAccuracy": {},
        "CategoricalCrossentropy": {},
        "CategoricalHinge": {},
        "F1Score": {"average": None},
        "FBetaScore": {"average": "macro", "beta": 2.0},
        "KLDivergence": {},
        "OneHotIoU": {"num_classes": 4, "target_class_ids": [0, 2]},
        "OneHotMeanIoU": {"num_classes": 4},
        "TopKCategoricalAccuracy": {"k": 2},
    },
    sparse: {
        "SparseCategoricalAccuracy": {},
        "SparseCategoricalCrossentropy": {},
        "SparseTopKCategoricalAccuracy": {"k": 2},
    },
    classes: {
        "Accuracy": {},
        "IoU": {"num_classes": 4, "target_class_ids": [0, 2]},
        "MeanIoU": {"num_classes": 4},
    },
    regression: {
        "ConcordanceCorrelation": {},
        "CosineSimilarity": {},
        "LogCoshError": {},
        "MeanAbsoluteError": {},
        "MeanAbsolutePercentageError": {},
        "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
        "MeanSquaredError": {},
        "MeanSquaredLogarithmicError": {},
        "PearsonCorrelation": {},
        "Poisson": {},
        "R2Score": {},
        "RootMeanSquaredError": {},
    },
    # The second array are the weights of the first.
    values: {"Mean": {}, "Sum": {}},
}
RATE = {"learning_rate": 0.1}
INITIAL = {"initial_learning_rate": 0.1}
SCHEDULES = {
    "CosineDecay": {
        **INITIAL,
        "decay_steps": 3,
        "warmup_target": 0.2,
        "warmup_steps": 2,
    },
    "CosineDecayRestarts": {**INITIAL, "first_decay_steps": 2},
    "ExponentialDecay": {**INITIAL, "decay_steps": 2, "decay_rate": 0.5},
    "InverseTimeDecay": {**INITIAL, "decay_steps": 2, "decay_rate": 0.5},
    "PiecewiseConstantDecay": {"boundaries": [1, 2], "values": [0.3, 0.2, 0.1]},
    "PolynomialDecay": {**INITIAL, "decay_steps": 3},
}
OPTIMIZERS = {
    **dict.fromkeys(
        (
            *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl"),
            *("Lamb", "Lion", "Muon", "Nadam", "RMSprop", "SGD", "ScheduleFreeAdamW"),
        ),
        RATE,
    ),
    "SGD nesterov": {**RATE, "momentum": 0.9, "nesterov": True},
}
# An optimizer in another one.
NESTED = {
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1)
    ),
    "MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(
        lambda variable: (
            keras.optimizers.Adam(0.1)
            if len(variable.shape) > 1
            else keras.optimizers.SGD(0.1)
        )
    ),
    "OptimizerMap": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1), {".*matrix": keras.optimizers.Adam(0.1)}
        )
    ),
}
# Thresholds far below the norms of the gradients.
FEATURES = {
    "weight_decay": 0.1,
    "use_ema": True,
    "ema_momentum": 0.9,
    "global_clipnorm": 0.02,
    "gradient_accumulation_steps": 2,
}


def in_float32(regularizer):
    """Return a regularizer of float64 for one that raises an error for it."""
    cast = keras.ops.cast
    return lambda weights: cast(regularizer(cast(weights, "float32")), "float64")


REGULARIZERS = {
    "L1": {},
    "L1L2": {"l1": 0.1, "l2": 0.1},
    "L2": {},
    "OrthogonalRegularizer": lambda: in_float32(
        keras.regularizers.OrthogonalRegularizer()
    ),
}
CONSTRAINTS = {
    "MaxNorm": {"max_value": 0.1},
    "MinMaxNorm": {"max_value": 0.1},
    "NonNeg": {},
    "UnitNorm": {},
}
INITIALIZERS = {
    name: {}
    for name in (
        *("Constant", "GlorotNormal", "GlorotUniform", "HeNormal", "HeUniform"),
        *("Identity", "LecunNormal", "LecunUniform", "Ones", "Orthogonal"),
        *("RandomNormal", "RandomUniform", "TruncatedNormal", "VarianceScaling"),
        "Zeros",
    )
}
CALLBACKS = {
    "BackupAndRestore": {"backup_dir": "backup"},
    "CSVLogger": {"filename": "log.csv"},
    "EarlyStopping": {"monitor": "loss", "patience": 1, "min_delta": 1e3},
    "History": {},
    "LambdaCallback": {},
    "LearningRateScheduler": {"schedule": lambda epoch: 0.1 / (1 + epoch)},
    "ModelCheckpoint": {"filepath": "model.keras"},
    "ProgbarLogger": {},
    "ReduceLROnPlateau": {"monitor": "loss", "patience": 1, "min_delta": 1e3},
    "SwapEMAWeights": {},
    "TensorBoard": {"log_dir": "logs"},
    "TerminateOnNaN": {},
}

# By the module of Keras.
TABLES = {
    "layers": LAYERS,
    "losses": LOSSES,
    "metrics": METRICS,
    "optimizers": {"": OPTIMIZERS, "nested": NESTED},
    "optimizers.schedules": {"": SCHEDULES},
    "regularizers": {"": REGULARIZERS},
    "constraints": {"": CONSTRAINTS},
    "initializers": {"": INITIALIZERS},
    "callbacks": {"": CALLBACKS},
}
NOT_ROWS = {
    "callbacks.Callback": "a base",
    "callbacks.CallbackList": "no callback",
    "callbacks.OrbaxCheckpoint": "needs orbax",
    "callbacks.RemoteMonitor": "needs a server",
    "constraints.Constraint": "a base",
    "initializers.Initializer": "a base",
    "initializers.STFT": "of the kernels of STFTSpectrogram alone",
    "layers.FlaxLayer": "needs Flax",
    "layers.InputLayer": "is in each model",
    "layers.InputSpec": "no layer",
    "layers.JaxLayer": "needs JAX",
    "layers.Layer": "a base",
    "layers.TorchModuleWrapper": "needs PyTorch",
    "layers.Wrapper": "a base",
    "losses.Loss": "a base",
    "metrics.Metric": "a base",
    "optimizers.Optimizer": "a base",
    "optimizers.schedules.LearningRateSchedule": "a base",
    "regularizers.Regularizer": "a base",
}
# The texts of warnings, on rank 0, where ranks compute what one process does not.
WARNED = {
    "layers.BatchNormalization": "BatchNormalization updates its moving statistics",
    **{
        f"losses.{kind}": f"The loss {kind.lower()} is computed of the samples of a"
        for kind in ("Circle", "Dice", "Tversky")
    },
}
# What Keras or TensorFlow computes in float32 alone.
IN_FLOAT32 = {
    "layers.MelSpectrogram range",
    "losses.CTC",
    "regularizers.OrthogonalRegularizer",
}
# What depends on the other samples of a batch, also in one process.
OF_BATCHES = {"layers.MelSpectrogram"}
# In the README's command; the others have a tier of their own.
SAMPLE = {
    "layers.BatchNormalization",
    "layers.BatchNormalization synchronized",
    "layers.Dense",
    "layers.Dropout",
    "losses.CTC",
    "losses.Dice",
    "losses.KLDivergence",
}


def _is_random(kind, name):
    """Return whether a layer draws in training; each rank draws other numbers.

    Layers that have dropout beside their purpose draw in rows that are named so.
    """
    parameters = inspect.signature(kind).parameters
    return "seed" in parameters and ("dropout" not in parameters or "dropout" in name)


RANDOM = {
    f"layers.{name}"
    for rows in LAYERS.values()
    for name in rows
    if (kind := getattr(layers, name.split()[0], None)) and _is_random(kind, name)
}
