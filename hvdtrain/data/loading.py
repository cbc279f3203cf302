"""The protocol that loads a data set once per node, then on every rank."""

import dataclasses

from hvdtrain.data import datasets
from hvdtrain.job.agreement import fail_together, gather


def load_everywhere(world, name, *, data_dir=None):
    """Return the same `Dataset` on every rank, and a warning. A collective.

    Local rank 0 of each node downloads it if needed, and the nodes agree on one data
    set: `auto` falls back to digits on all nodes where one has no MNIST.

    Args:
        world: the `World`.
        name: one of `datasets.NAMES`.
        data_dir: see `datasets.prepare`.

    Returns:
        The `Dataset`, and a warning for the user if it is a fallback, else "".

    Raises:
        JobError: on all ranks, as soon as one of them cannot load the data.
    """
    mine = None
    with fail_together(world):
        if world.local_rank == 0:
            mine = datasets.prepare(name, data_dir=data_dir)
    # Without the arrays: they are read on each node, not sent.
    sent = mine and dataclasses.replace(mine, dataset=None)
    choice = datasets.agree(each for each in gather(world, sent) if each)
    with fail_together(world):
        if mine and mine.dataset and mine.name == choice.name:
            dataset = mine.dataset
        else:
            dataset = datasets.load(choice.name, data_dir=data_dir)
    return dataset, choice.warning
