"""What layers, losses and metrics of a divided model need of their model group."""

import keras
import tensorflow as tf
from keras.src import api_export

from hvdtrain.collectives import transport
from hvdtrain.keras import collective_calls
from hvdtrain.keras.partition import Partition
from hvdtrain.parallel.mesh import Axes, active_mesh


class InModelGroup:
    """Mixin of a Keras object that computes with parts of tensors."""

    # Whether inputs, and outputs, are this rank's parts; see `keras.parts`.
    takes_parts = gives_parts = False
    # Arguments that the dense twin, and so the config, does not have.
    own_arguments = ()
    _divided_size = None

    @property
    def __class__(self):
        """The class of the dense twin: that of which Keras saves the object."""
        return next(cls for cls in type(self).__mro__ if _is_public(cls))

    def _set_mesh(self, mesh):
        collective_calls.install()
        self._model_axis = (mesh or active_mesh()).model

    def is_of(self, mesh):
        """Return whether it is divided over the axis model of this `Mesh`."""
        axis = getattr(self, "_model_axis", None)
        return axis is not None and [*axis.process_set.ranks] == [
            *mesh.model.process_set.ranks
        ]

    def remade(self, mesh):
        """Return a layer of the same class with the same arguments, for a `Mesh`.

        The config alone is that of the dense twin.
        """
        own = {name: getattr(self, name) for name in self.own_arguments}
        return type(self).from_config({**self.get_config(), **own, "mesh": mesh})

    def clone_divided(self) -> keras.layers.Layer:
        """Return a new layer that is divided alike, with new weights."""
        return self.remade(Axes(model=self._model_axis))

    def partition(self, axis, size):
        """Return the `Partition` of an axis of `size` elements over the model group."""
        model = self._model_axis
        return Partition(
            axis=axis,
            size=size,
            parts=model.size,
            rank=model.index,
            process_set=model.process_set,
        )

    def check_one_for_each_rank(self, size, name):
        """Raise a ValueError unless each rank gets one of so many units or inputs."""
        ranks = self._model_axis.size
        if size < ranks:
            raise ValueError(
                f"{type(self).__name__} needs one of its {name} on each of the {ranks} "
                f"ranks of the model group. Received: {size}. Use the dense layer here."
            )

    def sum_over_ranks(self, number):
        """Return the sum of a number of each rank of the model group."""
        # Also where the model is built while its first step is traced.
        with tf.init_scope():
            total = transport.combine(
                tf.constant(number), self._model_axis.process_set, name="DividedSize"
            )
            # AutoGraph turns int() of a tensor into another tensor.
            return total.numpy().item()

    def partition_of_part(self, part):
        """Return the `Partition` whose part on this rank is the last axis of a tensor.

        At the first call, the ranks add up their sizes. It stays the partition of this
        object: a later exchange on some of the ranks only would be a deadlock.

        Raises:
            ValueError: the axis has another size than `ColumnParallelDense` leaves.
        """
        size = part.shape[-1]
        if self._divided_size is None:
            self._divided_size = self.sum_over_ranks(size)
        partition = self.partition(len(part.shape) - 1, self._divided_size)
        expected = partition.sizes[partition.rank]
        if size != expected:
            raise ValueError(
                f"{type(self).__name__} takes the output of a ColumnParallelDense with "
                f"gather_output=False. Expected: {expected} of {partition.size} on "
                f"rank {partition.rank} of the model group. Received a tensor of shape "
                f"{tuple(part.shape)}."
            )
        return partition


def _is_public(cls):
    return api_export.get_name_from_symbol(cls) is not None
