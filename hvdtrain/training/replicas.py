"""The replicas of a model in a job, and the ranks of each."""

import dataclasses

from hvdtrain import parallel
from hvdtrain.job.world import MeshShape
from hvdtrain.keras.variables import get_hook


def make_mesh(shape):
    """Return the `parallel.Mesh` of a `MeshShape`; None where only data is divided."""
    if not shape.splits_model:
        return None
    return parallel.Mesh(model=shape.model, pipeline=shape.pipeline, data=shape.data)


@dataclasses.dataclass(frozen=True)
class Replicas:
    """How the ranks of a job are divided into replicas of the model.

    Without a mesh, each rank is one. The ranks of a replica read the same samples.

    Attributes:
        shape: the complete `MeshShape`.
        rank: this rank.
    """

    shape: MeshShape
    rank: int

    @classmethod
    def of(cls, world, mesh=None):
        """Return those of a `World` and a `parallel.Mesh`, or None for no mesh."""
        return cls(mesh.shape if mesh else MeshShape().of(world.size), world.rank)

    @classmethod
    def of_model(cls, world, model):
        """Return those of a model that is compiled with a distributed optimizer."""
        return cls.of(world, get_hook(model.optimizer).mesh)

    @property
    def size(self):
        """Number of replicas."""
        return self.shape.data

    @property
    def index(self):
        """Number of the replica that this rank belongs to."""
        return self.shape.coordinates(self.rank)["data"]

    def ranks(self, number):
        """Return the ranks of a replica, in their order."""
        count = self.shape.pipeline * self.shape.model
        return range(number * count, (number + 1) * count)

    def of_each(self, values):
        """Return, of the values of all ranks, those of each replica's first rank."""
        return [values[self.ranks(number)[0]] for number in range(self.size)]
