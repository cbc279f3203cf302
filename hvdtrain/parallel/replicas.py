"""The replicas of a model in a job, and the ranks of each."""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import keras

from hvdtrain.job.world import MeshShape, World
from hvdtrain.keras.replication import get_hook
from hvdtrain.parallel.mesh import Mesh

_Value = TypeVar("_Value")


def make_mesh(shape: MeshShape) -> Mesh | None:
    """Return the mesh of a shape; None if each rank has the full model."""
    if not shape.splits_model:
        return None
    return Mesh(model=shape.model, pipeline=shape.pipeline, data=shape.data)


def get_mesh(model: keras.Model) -> Mesh | None:
    """Return the mesh of a model that is compiled with a distributed optimizer."""
    # A model that was never compiled has no such attribute.
    hook = get_hook(getattr(model, "optimizer", None))
    return hook.mesh if hook else None


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of a model. Without a mesh, each rank has one.

    The ranks of a replica read the same samples. `data` of the shape is not None.
    """

    shape: MeshShape
    rank: int

    @classmethod
    def of(cls, world: World, mesh: Mesh | None = None) -> "Replicas":
        """Return the replicas on a mesh, or without one."""
        return cls(mesh.shape if mesh else MeshShape().of(world.size), world.rank)

    @classmethod
    def of_model(cls, world: World, model: keras.Model) -> "Replicas":
        """Return the replicas of a model; see `get_mesh`."""
        return cls.of(world, get_mesh(model))

    @property
    def size(self) -> int:
        """Number of replicas."""
        assert self.shape.data
        return self.shape.data

    @property
    def index(self) -> int:
        return self.shape.coordinates(self.rank)["data"]

    def ranks(self, number: int) -> range:
        """Return the ranks of a replica."""
        count = self.shape.pipeline * self.shape.model
        return range(number * count, (number + 1) * count)

    def of_each(self, values_by_rank: Sequence[_Value]) -> list[_Value]:
        """Return the value of each replica's first rank."""
        return [values_by_rank[self.ranks(number)[0]] for number in range(self.size)]
