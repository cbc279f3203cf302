"""The ranks of a job along the axes data, pipeline and model."""

import contextlib
import dataclasses

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.common import process_sets

from hvdtrain.collectives.process_sets import global_process_set, is_elastic
from hvdtrain.job.world import AXES, MeshShape, SharedJobError

_active = []


class OneRank:
    """A process set of this rank alone, for which Horovod needs none."""

    process_set_id = None

    def __init__(self):
        self.ranks = [horovod.rank()]

    def included(self):
        """Return True."""
        return True

    def size(self):
        """Return 1."""
        return 1

    def rank(self):
        """Return 0."""
        return 0


@dataclasses.dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one on one axis of the mesh only.

    Attributes:
        name: data, pipeline or model.
        size: number of these ranks.
        index: position of this rank on the axis.
        process_set: these ranks.
    """

    name: str
    size: int
    index: int
    process_set: object


@dataclasses.dataclass(frozen=True)
class Axes:
    """What a layer takes of a `Mesh`: the axes that it is divided along.

    Attributes:
        data: an `Axis`, or None.
        model: an `Axis`, or None.
    """

    data: Axis | None = None
    model: Axis | None = None


class Mesh:
    """Ranks arranged along the axes data, pipeline and model.

    Ranks that differ in `model` only are adjacent: they share a node. Ranks of one
    model group, and of one pipeline, read the same samples.

        with parallel.Mesh(model=2) as mesh:
            model = build()

    Its process sets are those of `job.start(mesh=MeshShape(model=2))`. Without it, all
    ranks make the mesh at the same time, with HOROVOD_DYNAMIC_PROCESS_SETS=1.

    With `model` above 1, it turns off the remapper of TensorFlow's graph optimizer
    (`tf.config.optimizer`), for functions that are traced afterwards.

    Args:
        model: ranks among which layers are divided.
        pipeline: ranks that hold successive stages of a model.
        data: replicas of the model; by default all ranks that are left.

    Attributes:
        shape: the `MeshShape`.
        data: an `Axis`.
        pipeline: an `Axis`.
        model: an `Axis`.
        previous: process set of this rank and the one with the stage before; None in
            the first stage.
        next: process set of this rank and the one with the stage after; None in the
            last stage.

    Raises:
        SharedJobError: the numbers do not fit, or the job is elastic.
        RuntimeError: without the process sets.
    """

    def __init__(self, model=1, pipeline=1, data=None):
        if is_elastic():
            raise SharedJobError(
                "A mesh needs a fixed number of ranks. Received: an elastic job."
            )
        shape = MeshShape(model=model, pipeline=pipeline, data=data)
        self.shape = shape.of(horovod.size())
        place = self.shape.coordinates(horovod.rank())
        known = _registered()
        sets = {ranks: _process_set(ranks, known) for ranks in self._ranks()}
        self._made = [each for ranks, each in sets.items() if ranks not in known]
        for name in AXES:
            (mine,) = [g for g in self.shape.groups(name) if horovod.rank() in g]
            axis = Axis(
                name, len(mine), place[name], sets.get(tuple(mine)) or _of(mine)
            )
            setattr(self, name, axis)
        self.previous = self.next = None
        for pair in self.shape.neighbours():
            if horovod.rank() in pair:
                end = "next" if horovod.rank() == pair[0] else "previous"
                setattr(self, end, sets.get(tuple(pair)) or _of(pair))

        if self.model.size > 1:
            # It fuses operations by shapes, which differ by rank where a size is not
            # divisible: copies of weights would differ in their last bit.
            tf.config.optimizer.set_experimental_options({"remapping": False})

    def _ranks(self):
        # Of one order on all ranks: to add a process set is a collective of all.
        return dict.fromkeys(map(tuple, self.shape.process_sets()))

    def remove(self):
        """Remove the process sets that this mesh has made. All ranks call it."""
        for process_set in self._made:
            horovod.remove_process_set(process_set)
        self._made = []

    def __enter__(self):
        """Make it the mesh of the layers that are made in the block."""
        _active.append(self)
        return self

    def __exit__(self, *_):
        """End the block."""
        _active.pop()


def active_mesh():
    """Return the `Mesh` of the innermost `with` block.

    Raises:
        RuntimeError: there is none.
    """
    if not _active:
        raise RuntimeError(
            "A divided layer or a pipeline was made outside of a mesh. Make it in a "
            "block `with parallel.Mesh(model=2):`, or pass mesh=."
        )
    return _active[-1]


def data_axis(mesh=None):
    """Return the axis data of a mesh, by default the active one.

    Without either, all ranks of the job are on it.

    Raises:
        RuntimeError: without either, in an elastic job.
    """
    if mesh or _active:
        return (mesh or active_mesh()).data
    if is_elastic():
        raise RuntimeError(
            "A divided embedding needs a fixed number of ranks. Received: an elastic "
            "job."
        )
    return Axis("data", horovod.size(), horovod.rank(), global_process_set)


def one_rank() -> Axes:
    """Return the axis data of this rank alone, for a layer that is not divided."""
    return Axes(data=Axis("data", 1, 0, OneRank()))


def _registered():
    # Horovod has no public function for it.
    ids = process_sets._basics._get_process_set_ids_and_ranks()
    return {tuple(ranks): number for number, ranks in ids.items()}


def _process_set(ranks, known):
    if ranks in known:
        process_set = horovod.ProcessSet(list(ranks))
        process_set.process_set_id = known[ranks]
        return process_set
    with contextlib.suppress(ValueError, RuntimeError):
        return horovod.add_process_set(list(ranks))
    raise RuntimeError(
        f"Horovod has no process set of the ranks {list(ranks)}. Pass "
        "mesh=MeshShape(...) to job.start, or set HOROVOD_DYNAMIC_PROCESS_SETS=1."
    )


def _of(ranks):
    return OneRank() if len(ranks) == 1 else global_process_set
