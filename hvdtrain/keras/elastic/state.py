"""What an elastic job keeps: model, optimizer and the user's own objects."""

import functools

import horovod.tensorflow as hvd
import keras
import numpy as np
from horovod.common.elastic import ObjectState

from hvdtrain.collectives import ops
from hvdtrain.collectives.objects import broadcast_object
from hvdtrain.keras.learning_rates import set_learning_rate
from hvdtrain.keras.optimizer import configure_compiled_model
from hvdtrain.keras.variables import replicated_variables


class KerasState(ObjectState):
    """What an elastic job commits, restores and shares: model, optimizer, and more.

    An optimizer that has not been built is built, so that a worker that joins late
    has all of the state that the others send it. When the number of ranks changes,
    a learning rate that is a number is multiplied by new ranks / old ranks (Goyal et
    al. 2017); one that a callback or a reset callback sets is what they say, and a
    `LearningRateSchedule` stays. `optimizer.configure_compiled_model(model)` is
    called.

    Args:
        model: a Keras model that has been built.
        optimizer: by default the one that the model was compiled with.
        **kwargs: objects to commit with them, `epoch=0, batch=0` for one; they
            become attributes.

    Raises:
        ValueError: for a model that has not been built, or has no optimizer.
    """

    def __init__(self, model, optimizer=None, **kwargs):
        if not model.built:
            raise ValueError(
                f"KerasState needs a model that has been built. Received: {model.name}."
                " Call model.build(input_shape) first."
            )
        optimizer = optimizer or model.optimizer
        if optimizer is None:
            raise ValueError(
                "KerasState needs an optimizer. Compile the model first, or pass one."
            )
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        configure_compiled_model(model)
        self.model = model
        self.optimizer = optimizer
        self._size = hvd.size()
        self._save_variables()
        super().__init__(
            bcast_object=functools.partial(broadcast_object, name="KerasState"),
            get_rank=hvd.rank,
            **kwargs,
        )

    def save(self):
        """Keeps a copy of everything in memory."""
        self._save_variables()
        super().save()

    def restore(self):
        """Takes everything back to the last copy."""
        for variable, value in zip(self._variables(), self._saved, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self):
        """Takes rank 0's model, optimizer and objects, and keeps a copy of them.

        Not the states of random layers, or all ranks would drop the same units; nor
        what is each rank's own: local variables, and accumulated gradients.
        """
        shared = replicated_variables(self.model, optimizer=self.optimizer)
        ops.broadcast_variables(shared, root_rank=0)
        self._save_variables()
        super().sync()

    def reset(self):
        """Adapts the learning rate, and its momentum, to a new number of ranks."""
        rate = getattr(self.optimizer, "learning_rate", None)
        if isinstance(rate, keras.Variable) and hvd.size() != self._size:
            set_learning_rate(
                self.optimizer, float(rate.numpy()) * hvd.size() / self._size
            )
        self._size = hvd.size()
        self.save()

    def _variables(self):
        return [*self.model.variables, *self.optimizer.variables]

    def _save_variables(self):
        self._saved = [np.array(variable.numpy()) for variable in self._variables()]
