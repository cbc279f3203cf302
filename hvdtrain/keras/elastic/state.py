"""State of an elastic job: model, optimizer and the user's own objects."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState, State, notification_manager
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from hvdtrain.collectives import graph, ops
from hvdtrain.collectives.dtypes import as_tensorflow
from hvdtrain.collectives.objects import broadcast_object
from hvdtrain.collectives.process_sets import is_elastic
from hvdtrain.job import launchers
from hvdtrain.job.backend import init
from hvdtrain.job.failures import is_collective_failure
from hvdtrain.keras import layer_state
from hvdtrain.keras.learning_rates import set_learning_rate
from hvdtrain.keras.optimizer import configure_compiled_model
from hvdtrain.keras.replication import non_local_variables
from hvdtrain.keras.variables import get_inner_optimizer


class KerasState(ObjectState):
    """State that an elastic job commits, restores and broadcasts.

    It holds the model, the optimizer and objects of the user. An optimizer that has not
    been built is built, so that a worker that joins late has a variable for each value
    that it receives. When the number of ranks changes, a learning rate that is a number
    is multiplied by new ranks / old ranks (Goyal et al. 2017). A callback or a reset
    callback may set another one, and a `LearningRateSchedule` stays.
    `optimizer.configure_compiled_model(model)` is called.

    Reset callbacks of Horovod's examples call `optimizer.lr.assign(rate)`, and Keras 3
    has no `lr`. Hence the optimizer is given an attribute `lr`, the TensorFlow variable
    of its learning rate. Assigning to the attribute itself has no effect in Keras 3.

    Args:
        model: a Keras model that has been built.
        optimizer: by default the compiled one, which is also taken if it is the
            `LossScaleOptimizer` around `optimizer`.
        **kwargs: objects to commit with them, `epoch=0, batch=0` for example; they
            become attributes. Another attribute is `epoch_steps`, the number of steps
            of the epoch in which `batch` counts: `UpdateBatchStateCallback` sets it.

    Raises:
        ValueError: for a model that has not been built, or has no optimizer.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        if not model.built:
            raise ValueError(
                f"KerasState needs a model that has been built. Received: {model.name}."
                " Call model.build(input_shape) first."
            )
        compiled = getattr(model, "optimizer", None)
        # Under mixed_float16, compile() wraps the optimizer. The scale is state, too.
        if optimizer is None or optimizer is get_inner_optimizer(compiled):
            optimizer = compiled
        if optimizer is None:
            raise ValueError(
                "KerasState needs an optimizer. Compile the model first, or pass one."
            )
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        rate = _rate_variable(optimizer)
        for owner in (optimizer, get_inner_optimizer(optimizer)):
            if rate is not None and not hasattr(owner, "lr"):
                # tf.keras.backend.set_value takes no Keras variable.
                owner.lr = as_tensorflow(rate)
        configure_compiled_model(model)
        self.model = model
        self.optimizer = optimizer
        self._size = hvd.size()
        self._save_variables()
        super().__init__(
            bcast_object=functools.partial(broadcast_object, name="KerasState"),
            get_rank=hvd.rank,
            **{"epoch_steps": None, **kwargs},
        )

    def save(self) -> None:
        """Copy the state, in memory."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Restore the last copy."""
        for variable, value in zip(self._variables(), self._saved, strict=True):
            variable.assign(value)
        layer_state.refresh(self.model)
        super().restore()

    def sync(self) -> None:
        """Broadcast rank 0's model, optimizer and objects, and copy them.

        States of random layers are not broadcast: all ranks would drop the same units.
        Local variables and accumulated gradients belong to their rank.
        """
        shared = non_local_variables(self.model, optimizer=self.optimizer)
        ops.broadcast_variables(shared, root_rank=0)
        layer_state.refresh(self.model)
        self._save_variables()
        super().sync()

    def reset(self) -> None:
        """Adapt the learning rate, and its momentum, to a new number of ranks."""
        rate = _rate_variable(self.optimizer)
        if rate is not None and hvd.size() != self._size:
            new_rate = float(rate.numpy()) * hvd.size() / self._size
            set_learning_rate(self.optimizer, new_rate)
        self._size = hvd.size()
        self.save()

    def _variables(self) -> list[keras.Variable]:
        return [*self.model.variables, *self.optimizer.variables]

    def _save_variables(self) -> None:
        self._saved = [np.array(variable.numpy()) for variable in self._variables()]


class TensorFlowKerasState(KerasState):
    """Horovod's name of `KerasState` outside of its Keras module.

    Args:
        model, optimizer, **kwargs: as in `KerasState`.
        backend: ignored: it gave Horovod the session of TensorFlow 1.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        backend: object = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, optimizer, **kwargs)


def _rate_variable(optimizer: keras.optimizers.Optimizer) -> keras.Variable | None:
    # A schedule has no variable.
    rate = getattr(optimizer, "learning_rate", None)
    return rate if isinstance(rate, keras.Variable) else None


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make `func(state, ...)` survive the loss and the arrival of workers.

    Decorate the function that trains. Before each call, every worker receives rank 0's
    state. When a collective fails because a worker is lost, the others restore the
    last commit, form a new job and call the function again. When workers are added or
    removed by the launcher, nothing is restored.

    Call no collective before it: a worker that joins later starts the script from the
    beginning and would run that collective while the others run `state.sync()`. Only
    collectives that a reset callback of the state repeats are allowed.

    Args:
        func: takes a `KerasState`, or another `State` of Horovod, as first argument.

    Raises:
        RuntimeError: in an elastic job, if collectives were run before and the state
            has no reset callback that may repeat them.
        Exception: `func` has raised it, and no collective has failed.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        _check_no_collectives_before(state)
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            return _run_to_the_end(func, state, *args, **kwargs)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


@functools.cache
def _collectives_before_first_run() -> int:
    # Cached: the collectives of a run do not count for the next one.
    return graph.number_of_collectives()


def _check_no_collectives_before(state: State) -> None:
    count = _collectives_before_first_run()
    if not is_elastic() or not count:
        return
    message = (
        f"{count} collectives were run before hvd.elastic.run. Expected none: a worker "
        "that joins later runs them while the others wait in state.sync(), and the job "
        "deadlocks. Move them into the decorated function. To build a model, use "
        "model.build(input_shape)."
    )
    if not state._reset_callbacks:
        raise RuntimeError(message)
    warnings.warn(f"{message} Or repeat them in a reset callback.", stacklevel=3)


def _run_to_the_end(
    func: Callable[..., Any], state: State, *args: Any, **kwargs: Any
) -> Any:
    needs_sync = True
    while True:
        try:
            with _collective_failures():
                if needs_sync:
                    state.sync()
                return func(state, *args, **kwargs)
        except HorovodInternalError:
            state.restore()
            needs_sync = True
        except HostsUpdatedInterrupt as interrupt:
            needs_sync = not interrupt.skip_sync
        hvd.shutdown()
        init()
        # Horovod changes environment variables in C: `os.environ` keeps the old ones.
        launchers.assign(rank=hvd.rank(), size=hvd.size())
        state.on_reset()


@contextlib.contextmanager
def _collective_failures() -> Iterator[None]:
    try:
        yield
    except tf.errors.OpError as error:
        if is_collective_failure(error):
            raise HorovodInternalError(str(error)) from error
        raise
