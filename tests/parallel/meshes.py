"""Meshes, dense twins and their slices: what the tests of divided models share."""

import contextlib

import keras
import numpy as np
import oracle

import hvdtrain.keras as hvd
from hvdtrain import parallel
from hvdtrain.sharding.shards import get_sharding


class Summing(keras.layers.Embedding):
    """An Embedding of dense gradients.

    Keras' Adam, and its norms, do not add up the rows of an id that repeats.
    """

    def call(self, inputs):
        """The rows of the ids, by a product with the whole table."""
        rows = keras.ops.one_hot(inputs, self.input_dim, dtype=self.compute_dtype)
        return keras.ops.matmul(rows, self.embeddings)


@contextlib.contextmanager
def all_meshes():
    """All ranks in one model group, and of four also two groups of two."""
    found = [parallel.Mesh(model=hvd.size())]
    if hvd.size() == 4:
        found.append(parallel.Mesh(model=2))
    yield found
    for mesh in found:
        mesh.remove()


def slice_of(variable, dense):
    """This rank's part of the value of a variable of the dense twin."""
    sharding = get_sharding(variable)
    return sharding.shard(dense) if sharding else dense


def fit_replicas(mesh, model, inputs, labels, batch_size, callbacks=()):
    """`oracle.fit` of this rank's replica on its samples; returns its history."""
    oracle.build_optimizer(model)
    mine = slice(mesh.data.index, None, mesh.data.size)
    return oracle.fit(
        *(model, inputs[mine], labels[mine], batch_size),
        callbacks=[*callbacks, hvd.callbacks.MetricAverageCallback()],
    ).history


def assert_slices_of(model, dense_weights, atol=2e-6):
    """A model has slices of dense weights, and copies that are equal bit for bit."""
    for variable, wanted in zip(model.weights, dense_weights, strict=True):
        np.testing.assert_allclose(variable, slice_of(variable, wanted), atol=atol)
    replicated = [w.numpy() for w in model.weights if not get_sharding(w)]
    oracle.assert_bitwise_equal_over_ranks(replicated)
