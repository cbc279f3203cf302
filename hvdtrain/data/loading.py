"""The protocol that loads a data set once per node, for every rank."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from hvdtrain.data import datasets, node_memory
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.job.world import World

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


class _Shared(NamedTuple):
    name: str
    num_classes: int
    handles: dict[str, node_memory.Handle]


def load_everywhere(
    world: World, name: str, *, data_dir: str | None = None
) -> tuple[datasets.Dataset, str]:
    """Return the same `Dataset` on every rank, and a warning. A collective.

    Local rank 0 of each node downloads it if needed, and the nodes agree on one data
    set: `auto` falls back to digits on all nodes where one has no MNIST. Local rank 0
    reads and checks it, and the other ranks of its node map its arrays. A rank that
    cannot map them reads the files as well. `datasets.prepare` has the arguments.

    Returns:
        The `Dataset`, and a warning for the user if it is a fallback, else "". Its
        arrays are read-only where the node has several ranks.

    Raises:
        JobError: on all ranks, as soon as one of them cannot load the data.
    """
    prepared = dataset = None
    with fail_together(world):
        if world.local_rank == 0:
            prepared = datasets.prepare(name, data_dir=data_dir)
    # Without the arrays: `gather` would send 55 MB to every rank.
    sent = prepared and dataclasses.replace(prepared, dataset=None)
    choice = datasets.agree(filter(None, gather(world, sent)))
    with fail_together(world):
        if prepared and prepared.name == choice.name:
            dataset = prepared.dataset
        if prepared and not dataset:
            dataset = datasets.load(choice.name, data_dir=data_dir)
    with _sharing(world, dataset) as shared_by_rank, fail_together(world):
        dataset = _map_first(shared_by_rank) or dataset
        if not dataset:
            dataset = datasets.load(choice.name, data_dir=data_dir)
    return dataset, choice.warning


@contextlib.contextmanager
def _sharing(
    world: World, dataset: datasets.Dataset | None
) -> Iterator[list[_Shared | None]]:
    """Yield what each rank shares with the ranks of its node. A collective."""
    shared = None
    with contextlib.ExitStack() as files:
        if dataset and world.local_size > 1:
            arrays = {key: getattr(dataset, key) for key in _ARRAYS}
            with contextlib.suppress(OSError):
                handles = node_memory.share(arrays, files)
                shared = _Shared(dataset.name, dataset.num_classes, handles)
        yield gather(world, shared)


def _map_first(shared_by_rank: list[_Shared | None]) -> datasets.Dataset | None:
    """Return the `Dataset` that a rank of this node shares, or None."""
    for shared in filter(None, shared_by_rank):
        with contextlib.suppress(OSError):
            return datasets.Dataset(
                name=shared.name,
                num_classes=shared.num_classes,
                **node_memory.attach(shared.handles),
            )
    return None
