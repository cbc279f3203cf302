"""Steps of the models of the zoo: of one process, and of each rank's part of a batch.

Keras' Adam, and its norms, do not add up the rows of an id that repeats: embeddings of
the one process have dense gradients, as fully sharded ones have.
"""

import keras
import numpy as np
import oracle
import tensorflow as tf
import zoo


def in_steps(nest, step):
    """The global batch of a step."""
    start = step * zoo.GLOBAL_BATCH_SIZE
    batch = slice(start, start + zoo.GLOBAL_BATCH_SIZE)
    return keras.tree.map_structure(lambda array: array[batch], nest)


def dealt(nest):
    """This rank's part of a global batch."""
    return keras.tree.map_structure(oracle.shard, nest)


def build(make_model):
    """A model with the same initial weights in every call."""
    keras.utils.set_random_seed(7)
    return make_model()


def loss():
    """The loss of logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compile_with(model, optimizer, is_eager=True):
    """Compile a model of the zoo; return it."""
    nest = model.output if hasattr(model, "output") else None
    losses = {name: loss() for name in nest} if isinstance(nest, dict) else loss()
    model.compile(optimizer, losses, run_eagerly=is_eager)
    return model


def train_plainly(model, batches):
    """Take the steps of one process, with dense gradients."""
    optimizer = model.optimizer
    for inputs, targets in batches:
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            total = model.compute_loss(x=inputs, y=targets, y_pred=outputs)
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                total = optimizer.scale_loss(total)
        gradients = tape.gradient(total, model.trainable_variables)
        optimizer.apply(
            list(map(tf.convert_to_tensor, gradients)), model.trainable_variables
        )


def end(model):
    """What ends `fit`."""
    model.optimizer.finalize_variable_values(model.trainable_variables)


def values(model):
    """The full values of all weights. A collective of a sharded model."""
    return [v.numpy() for v in model.weights]


def global_batches(make_model):
    """The inputs and targets of each step."""
    return [in_steps(zoo.samples(make_model), step) for step in range(zoo.STEPS)]


def train_one_process(make_model, optimizer):
    """Return the weights after the steps of one process."""
    model = compile_with(build(make_model), optimizer)
    train_plainly(model, global_batches(make_model))
    end(model)
    return values(model)


def assert_close(model, expected, tolerance=1e-10):
    """All weights of a model are equal to full values, to a tolerance."""
    pairs = zip(model.weights, expected, strict=True)
    found = {v.path: np.abs(v.numpy() - wanted).max() for v, wanted in pairs}
    assert max(found.values()) <= tolerance, found
