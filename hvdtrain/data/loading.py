"""The protocol that loads a data set once per node, for every rank."""

import contextlib
import dataclasses
import os

from hvdtrain.data import datasets, node_memory
from hvdtrain.job.agreement import fail_together, gather

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


def load_everywhere(world, name, *, data_dir=None):
    """Return the same `Dataset` on every rank, and a warning. A collective.

    Local rank 0 of each node downloads it if needed, and the nodes agree on one data
    set: `auto` falls back to digits on all nodes where one has no MNIST. Local rank 0
    reads and checks it, and the other ranks of its node map its arrays. A rank that
    cannot map them reads the files as well.

    Args:
        world: the `World`.
        name: one of `datasets.NAMES`.
        data_dir: see `datasets.prepare`.

    Returns:
        The `Dataset`, and a warning for the user if it is a fallback, else "". Its
        arrays are read-only where the node has several ranks.

    Raises:
        JobError: on all ranks, as soon as one of them cannot load the data.
    """
    mine = dataset = None
    with fail_together(world):
        if world.local_rank == 0:
            mine = datasets.prepare(name, data_dir=data_dir)
    # Without the arrays: they stay on the node.
    sent = mine and dataclasses.replace(mine, dataset=None)
    choice = datasets.agree(each for each in gather(world, sent) if each)
    with fail_together(world):
        if mine and mine.dataset and mine.name == choice.name:
            dataset = mine.dataset
        elif mine:
            dataset = datasets.load(choice.name, data_dir=data_dir)
    with _shared(world, dataset) as shared, fail_together(world):
        dataset = _mapped(shared) or dataset
        if not dataset:
            dataset = datasets.load(choice.name, data_dir=data_dir)
    return dataset, choice.warning


@contextlib.contextmanager
def _shared(world, dataset):
    """Yield what each rank shares with those of its node, by rank. A collective.

    Args:
        world: the `World`.
        dataset: the `Dataset` of local rank 0, None on other ranks.
    """
    descriptor = mine = None
    if dataset and world.local_size > 1:
        arrays = {key: getattr(dataset, key) for key in _ARRAYS}
        with contextlib.suppress(OSError):
            descriptor, handle = node_memory.share(arrays)
            mine = dataset.name, dataset.num_classes, handle
    try:
        yield gather(world, mine)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _mapped(shared):
    """Return the `Dataset` that a rank of this node shares, or None."""
    shared = [each for each in shared if each]
    if not shared:
        return None
    name, num_classes, _ = shared[0]
    try:
        arrays = node_memory.attach([handle for _, _, handle in shared])
    except OSError:
        return None
    return datasets.Dataset(name=name, num_classes=num_classes, **arrays)
