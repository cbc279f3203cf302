"""The oracle: the same training in one process, with the batch of all ranks.

Global batch `s` of the job is `X[s * G:(s + 1) * G]`, dealt to the ranks by stride.
The model has no dropout and no batch normalisation, so that one process computes
the same function of the same samples.
"""

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd

STEPS = 20
LOCAL_BATCH_SIZE = 4
FEATURES = 6
CLASSES = 3
LOSS = "sparse_categorical_crossentropy"


class DenseEmbedding(keras.layers.Embedding):
    """A table whose gradient is dense, as under `keras.distribution` and on JAX."""

    def call(self, inputs):
        one_hot = keras.ops.one_hot(inputs, self.input_dim, dtype=self.compute_dtype)
        return one_hot @ self.embeddings


class Centre(keras.layers.Layer):
    """Keeps a moving average of its batches, as codebooks do."""

    def __init__(self, aggregation="none"):
        super().__init__()
        self.aggregation = aggregation

    def build(self, shape):
        self.centre = self.add_weight(
            shape=shape[1:],
            initializer="zeros",
            trainable=False,
            aggregation=self.aggregation,
            name="centre",
        )

    def call(self, x, training=False):
        if training:
            self.centre.assign(0.5 * self.centre + 0.5 * tf.reduce_mean(x, 0))
        return x - self.centre


def samples(steps=STEPS):
    """Inputs and labels of `steps` global batches."""
    rng = np.random.default_rng(0)
    count = steps * LOCAL_BATCH_SIZE * hvd.size()
    inputs = rng.normal(size=(count, FEATURES)).astype("float32")
    labels = rng.integers(0, CLASSES, count)
    return inputs, labels


def shard(array):
    """This rank's part of an array of global batches."""
    return array[hvd.rank() :: hvd.size()]


def fit(model, inputs, labels, batch_size=LOCAL_BATCH_SIZE, **options):
    """Trains `model` under `fit` on arrays in their order; returns the history."""
    return model.fit(
        inputs, labels, batch_size=batch_size, shuffle=False, verbose=0, **options
    )


def fit_shard(model, inputs, labels, **options):
    """`fit` on this rank's part of arrays of global batches."""
    return fit(model, shard(inputs), shard(labels), **options)


def build_optimizer(model):
    """Build the optimizer before `fit`, as `BroadcastGlobalVariablesCallback` does.

    Otherwise the first trace of a step creates the optimizer's variables, and
    `tf.function` traces the step a second time, which takes most of a short training.
    """
    if model.built:
        model.optimizer.build(model.trainable_variables)


def fit_big_batch(model, inputs, labels, **options):
    """`fit` on global batches, as one process."""
    build_optimizer(model)
    return fit(model, inputs, labels, LOCAL_BATCH_SIZE * hvd.size(), **options)


def on_one_process(train):
    """Calls `train` on rank 0 alone; returns its result on every rank."""
    return hvd.broadcast_object(train() if hvd.rank() == 0 else None, name="oracle")


def fit_on_one_process(make_model, *arguments, **options):
    """`fit` of `make_model()` on rank 0; returns history and weights on every rank."""

    def train():
        model = make_model()
        build_optimizer(model)
        return fit(model, *arguments, **options).history, model.get_weights()

    return on_one_process(train)


def build_model(model_class=keras.Sequential):
    """A small dense classifier with the same initial weights in every call."""
    keras.utils.set_random_seed(7)
    model = model_class(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    return model


class CustomStepModel(keras.Sequential):
    """A user's own `train_step`."""

    def train_step(self, data):
        inputs, labels = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=inputs, y=labels, y_pred=self(inputs))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        return {"loss": loss}


def train_by_fit(
    optimizer,
    inputs,
    labels,
    batch_size,
    model_class=keras.Sequential,
    *,
    is_built=True,
    **compile_args,
):
    """Trains one epoch under `fit`; returns the model.

    Args:
        is_built: whether the optimizer is built before the first step is traced.
    """
    model = build_model(model_class)
    model.compile(optimizer, LOSS, **compile_args)
    if is_built:
        build_optimizer(model)
    fit(model, inputs, labels, batch_size)
    return model


def train_by_loop(optimizer, inputs, labels, batch_size):
    """Trains one epoch in a loop of a user's own; returns the model."""
    model = build_model()
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(batch_inputs, batch_labels):
        with tf.GradientTape() as tape:
            loss = loss_of(batch_labels, model(batch_inputs, training=True))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    optimizer.build(model.trainable_variables)
    for start in range(0, len(inputs), batch_size):
        batch = slice(start, start + batch_size)
        step(tf.constant(inputs[batch]), tf.constant(labels[batch]))
    # fit ends with this; it writes the moving averages, where there are any.
    optimizer.finalize_variable_values(model.trainable_variables)
    return model


def difference(weights, others):
    """The largest difference of any weight."""
    return max(np.abs(a - b).max() for a, b in zip(weights, others, strict=True))


def assert_bitwise_equal_over_ranks(arrays):
    """Checks that every rank holds the same bytes."""
    mine = [np.asarray(array).tobytes() for array in arrays]
    for rank, theirs in enumerate(hvd.allgather_object(mine, name="bytes")):
        assert theirs == mine, f"rank {rank} differs from rank {hvd.rank()}"


class KilledError(Exception):
    """Ends a training without any of its cleaning up."""


def killed_after(batches):
    """A callback that ends a training by `KilledError`."""
    left = iter(range(batches))

    def on_batch_end(batch, logs):
        if next(left, None) is None:
            raise KilledError

    return keras.callbacks.LambdaCallback(on_train_batch_end=on_batch_end)


def assert_same_state(model, expected, atol=0.0):
    """Weights and optimizer state of two models are equal, to `atol`."""
    pairs = zip(
        [*model.weights, *model.optimizer.variables],
        [*expected.weights, *expected.optimizer.variables],
        strict=True,
    )
    for variable, wanted in pairs:
        np.testing.assert_allclose(
            variable, wanted, rtol=0, atol=atol, err_msg=variable.path
        )
