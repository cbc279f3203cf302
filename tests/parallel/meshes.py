"""Meshes, dense twins and their slices: what the tests of divided models share."""

import contextlib

import hvdtrain.keras as hvd
from hvdtrain import parallel
from hvdtrain.keras.partition import partition_of


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
    partition = partition_of(variable)
    return partition.of(dense) if partition else dense
