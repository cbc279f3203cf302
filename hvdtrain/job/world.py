"""The position of a process in its job and in a mesh, and the error that ends a job."""

import dataclasses
import itertools


class JobError(Exception):
    """The job cannot continue. The message is one line: the reason and the remedy."""

    exit_code = 1


class SharedJobError(JobError):
    """A `JobError` that is raised on every rank alike: rank 0 alone prints it."""


class PreemptedError(SharedJobError):
    """The job was preempted; it continues when it is started again.

    Its exit code is EX_TEMPFAIL of sysexits.h, on which schedulers can requeue.
    """

    exit_code = 75


@dataclasses.dataclass(frozen=True)
class World:
    """The position of this process in the job, and on its node; ranks count from 0.

    Attributes:
        seed: of the job, the same on all ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    seed: int = 0

    @property
    def is_chief(self) -> bool:
        """Whether this is the rank that prints and writes files."""
        return self.rank == 0


AXES = ("data", "pipeline", "model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """The number of ranks along each axis.

    Rank `(d * pipeline + p) * model + m` has the coordinates (d, p, m): ranks that
    differ in `model` only are adjacent, so that they share a node.

    Attributes:
        model: ranks over which layers are sharded.
        pipeline: ranks that hold successive stages of a model.
        data: replicas of the model; None for all ranks that are left.
    """

    model: int = 1
    pipeline: int = 1
    data: int | None = None

    def __post_init__(self) -> None:
        for name in AXES:
            size = getattr(self, name)
            is_number = isinstance(size, int) or (size is None and name == "data")
            if not is_number or (size is not None and size < 1):
                raise SharedJobError(
                    f"Received {name}={size!r}; expected a number, 1 or more."
                )

    @property
    def splits_model(self) -> bool:
        """Whether a rank holds only a shard of the model."""
        return self.model * self.pipeline > 1

    def of(self, size: int) -> "MeshShape":
        """Return the shape for `size` ranks, in which `data` is a number.

        Raises:
            SharedJobError: they do not fit.
        """
        inner = self.model * self.pipeline
        data = self.data or size // inner
        if data * inner != size or not data:
            sizes = {"data": self.data, "pipeline": self.pipeline, "model": self.model}
            wanted = ", ".join(f"{name}={n}" for name, n in sizes.items() if n)
            raise SharedJobError(
                f"Received {size} ranks for a mesh with {wanted}; expected "
                f"{'a multiple of ' if self.data is None else ''}"
                f"{(self.data or 1) * inner}."
            )
        return dataclasses.replace(self, data=data)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank on each axis, by name."""
        data, rest = divmod(rank, self.model * self.pipeline)
        pipeline, model = divmod(rest, self.model)
        return {"data": data, "pipeline": pipeline, "model": model}

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ on one axis only.

        The shape must be complete: `data` is a number.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self._size()):
            coordinates = self.coordinates(rank)
            del coordinates[axis]
            groups.setdefault(tuple(coordinates.values()), []).append(rank)
        return list(groups.values())

    def neighbours(self) -> list[list[int]]:
        """Return the pairs of ranks that hold successive stages.

        The shape must be complete.
        """
        pairs = map(itertools.pairwise, self.groups("pipeline"))
        return list(map(list, itertools.chain.from_iterable(pairs)))

    def process_sets(self) -> list[list[int]]:
        """Return all groups that need a process set of Horovod.

        A group of one rank needs none, and the process set of all ranks exists. The
        shape must be complete.
        """
        size = self._size()
        groups = [group for axis in AXES for group in self.groups(axis)]
        # In a pipeline of two ranks, the neighbours are a group already.
        groups += [pair for pair in self.neighbours() if pair not in groups]
        return [group for group in groups if 1 < len(group) < size]

    def _size(self) -> int:
        assert self.data is not None
        return self.data * self.pipeline * self.model
