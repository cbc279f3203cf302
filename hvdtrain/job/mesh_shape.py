"""Ranks arranged along the axes data, pipeline and model. A pure function of sizes."""

import dataclasses
import itertools

from hvdtrain.job.world import SharedJobError

AXES = ("data", "pipeline", "model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """The number of ranks along each axis.

    Rank `(d * pipeline + p) * model + m` has the coordinates (d, p, m): ranks that
    differ in `model` only are adjacent, so that they share a node.

    Attributes:
        model: ranks among which layers are divided.
        pipeline: ranks that hold successive stages of a model.
        data: replicas of the model; None for all ranks that are left.
    """

    model: int = 1
    pipeline: int = 1
    data: int | None = None

    def __post_init__(self):
        """Check the numbers."""
        for name in AXES:
            size = getattr(self, name)
            is_number = isinstance(size, int) or (size is None and name == "data")
            if not is_number or (size is not None and size < 1):
                raise SharedJobError(
                    f"Received {name}={size!r}; expected a number, 1 or more."
                )

    @property
    def divides_model(self):
        """Whether a rank has only a part of the model."""
        return self.model * self.pipeline > 1

    def of(self, size):
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

    def coordinates(self, rank):
        """Return the position of a rank on each axis, by name. Of a complete shape."""
        data, rest = divmod(rank, self.model * self.pipeline)
        pipeline, model = divmod(rest, self.model)
        return {"data": data, "pipeline": pipeline, "model": model}

    def groups(self, axis):
        """Return the groups of ranks that differ on one axis only, as lists.

        Of a complete shape.
        """
        found = {}
        for rank in range(self.data * self.pipeline * self.model):
            place = self.coordinates(rank)
            del place[axis]
            found.setdefault(tuple(place.values()), []).append(rank)
        return list(found.values())

    def neighbours(self):
        """Return the pairs of ranks that hold successive stages, as lists.

        Of a complete shape.
        """
        pipelines = self.groups("pipeline")
        return [list(pair) for each in pipelines for pair in itertools.pairwise(each)]

    def process_sets(self):
        """Return all groups that need a process set of Horovod. Of a complete shape.

        Those of one rank need none, and that of all ranks exists.
        """
        size = self.data * self.pipeline * self.model
        groups = [group for axis in AXES for group in self.groups(axis)]
        # In a pipeline of two ranks, the neighbours are a group already.
        groups += [pair for pair in self.neighbours() if pair not in groups]
        return [group for group in groups if 1 < len(group) < size]
