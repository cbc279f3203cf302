"""The ranks of a job along the axes data, pipeline and model."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.common import process_sets
from horovod.tensorflow import ProcessSet

from hvdtrain.collectives.process_sets import global_process_set, is_elastic
from hvdtrain.job.world import AXES, MeshShape, SharedJobError

_active: list["Mesh"] = []


class OneRank:
    """A process set of this rank alone. Horovod registers none: it never communicates.

    It has the methods of `ProcessSet` that are called on process sets of a mesh.
    """

    process_set_id = None

    def __init__(self) -> None:
        self.ranks = [horovod.rank()]

    def included(self) -> bool:
        return True

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Axis:
    """The group of this rank along one axis of a mesh.

    The ranks of the group differ in this coordinate only; `index` is this rank's.
    """

    name: str
    size: int
    index: int
    process_set: ProcessSet | OneRank


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a `Mesh` that layers are sharded along; by default this rank alone.

    A layer takes it in place of a mesh: to shard a clone as the original is, or to load
    a saved layer with its full weights on one rank.
    """

    data: Axis = dataclasses.field(
        default_factory=lambda: Axis("data", 1, 0, OneRank())
    )
    model: Axis = dataclasses.field(
        default_factory=lambda: Axis("model", 1, 0, OneRank())
    )


class Mesh:
    """Ranks arranged along the axes data, pipeline and model.

    Ranks that differ in `model` only are adjacent: they share a node. Ranks of one
    model group, and of one pipeline, read the same samples.

        with parallel.Mesh(model=2) as mesh:
            model = build()

    `job.start(mesh=MeshShape(model=2))` registers the process sets that the mesh needs.
    Otherwise the mesh adds them to Horovod: all ranks then construct it at the same
    time, with HOROVOD_DYNAMIC_PROCESS_SETS=1.

    With `model` above 1, the remapper of TensorFlow's graph optimizer is turned off
    (`tf.config.optimizer`), for functions that are traced afterwards.

    Args:
        model: ranks among which layers are sharded.
        pipeline: ranks that hold successive stages of a model.
        data: replicas of the model; by default all ranks that are left.

    Raises:
        SharedJobError: the numbers do not fit, or the job is elastic.
        RuntimeError: without the process sets.
    """

    data: Axis
    pipeline: Axis
    model: Axis
    # This rank and the rank with the stage before, or after; None without such a stage.
    previous: ProcessSet | None = None
    next: ProcessSet | None = None

    def __init__(
        self, model: int = 1, pipeline: int = 1, data: int | None = None
    ) -> None:
        if is_elastic():
            raise SharedJobError(
                "A mesh needs a fixed number of ranks. Received: an elastic job."
            )
        shape = MeshShape(model=model, pipeline=pipeline, data=data)
        self.shape = shape.of(horovod.size())
        registered = _registered_process_sets()
        # To add a process set is a collective of all ranks. A dict keeps the order,
        # which must be equal on all of them.
        groups = dict.fromkeys(map(tuple, self.shape.process_sets()))
        sets = {ranks: _get_process_set(ranks, registered) for ranks in groups}
        self._added = [sets[ranks] for ranks in sets if ranks not in registered]
        self._set_axes(sets)
        self._set_neighbours(sets)
        if self.model.size > 1:
            # The remapper fuses operations depending on their shapes, which differ by
            # rank where a size is not divisible: replicated weights would differ in
            # their last bit.
            tf.config.optimizer.set_experimental_options({"remapping": False})

    def _set_axes(self, sets: Mapping[tuple[int, ...], ProcessSet]) -> None:
        rank = horovod.rank()
        coordinates = self.shape.coordinates(rank)
        for name in AXES:
            (group,) = [ranks for ranks in self.shape.groups(name) if rank in ranks]
            process_set = sets.get(tuple(group)) or _predefined_process_set(group)
            setattr(self, name, Axis(name, len(group), coordinates[name], process_set))

    def _set_neighbours(self, sets: Mapping[tuple[int, ...], ProcessSet]) -> None:
        for pair in self.shape.neighbours():
            if horovod.rank() in pair:
                side = "next" if horovod.rank() == pair[0] else "previous"
                process_set = sets.get(tuple(pair)) or _predefined_process_set(pair)
                setattr(self, side, process_set)

    def remove(self) -> None:
        """Remove the process sets that this mesh has added. All ranks call it."""
        for process_set in self._added:
            horovod.remove_process_set(process_set)
        self._added = []

    def __enter__(self) -> "Mesh":
        _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.pop()


def active_mesh() -> Mesh:
    """Return the `Mesh` of the innermost `with` block.

    Raises:
        RuntimeError: there is none.
    """
    if not _active:
        raise RuntimeError(
            "A sharded layer or a pipeline was made outside of a mesh. Make it in a "
            "block `with parallel.Mesh(model=2):`, or pass mesh=."
        )
    return _active[-1]


def data_axis(mesh: Mesh | Axes | None = None) -> Axis:
    """Return the axis data of a mesh, by default of the active one.

    Without any mesh, all ranks of the job are on this axis.

    Raises:
        RuntimeError: without any mesh, in an elastic job.
    """
    if mesh or _active:
        return (mesh or active_mesh()).data
    if is_elastic():
        raise RuntimeError(
            "Sharded weights need a fixed number of ranks. Received: an elastic job."
        )
    return Axis("data", horovod.size(), horovod.rank(), global_process_set)


def _registered_process_sets() -> dict[tuple[int, ...], int]:
    """Return the ids of Horovod's process sets, by their ranks."""
    # Horovod has no public function for it.
    ids = process_sets._basics._get_process_set_ids_and_ranks()
    return {tuple(ranks): number for number, ranks in ids.items()}


def _get_process_set(
    ranks: tuple[int, ...], registered: Mapping[tuple[int, ...], int]
) -> ProcessSet:
    if ranks in registered:
        process_set = horovod.ProcessSet(list(ranks))
        process_set.process_set_id = registered[ranks]
        return process_set
    with contextlib.suppress(ValueError, RuntimeError):
        return horovod.add_process_set(list(ranks))
    raise RuntimeError(
        f"Horovod has no process set of the ranks {list(ranks)}. Pass "
        "mesh=MeshShape(...) to job.start, or set HOROVOD_DYNAMIC_PROCESS_SETS=1."
    )


def _predefined_process_set(ranks: Sequence[int]) -> ProcessSet | OneRank:
    """Return the process set of a group that none is registered for: one or all."""
    return OneRank() if len(ranks) == 1 else global_process_set
