"""The loop around a training function that calls it again after a change of the job."""

import contextlib
import functools
import warnings

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.elastic import notification_manager
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from hvdtrain.collectives import graph
from hvdtrain.collectives.failures import is_collective_failure
from hvdtrain.collectives.process_sets import is_elastic
from hvdtrain.job import launchers
from hvdtrain.job.backend import init


def run(func):
    """Makes `func(state, ...)` survive the loss and the arrival of workers.

    Decorate the function that trains. Before each call, every worker receives rank 0's
    state. When a collective fails because a worker is lost, the others restore the
    last commit, form a new job and call the function again. When workers are added or
    removed by the launcher, nothing is restored.

    Call no collective before it: a worker that joins later starts the script from the
    beginning and would run that collective while the others run `state.sync()`. Only
    collectives that a reset callback of the state repeats are allowed.

    Args:
        func: a function whose first argument is a `KerasState`, or another state of
            Horovod's.

    Returns:
        A function that returns what `func` returns.

    Raises:
        RuntimeError: in an elastic job, if collectives were run before and the state
            has no reset callback that may repeat them.
        Exception: whatever `func` raises that is not a failed collective.
    """

    @functools.wraps(func)
    def wrapper(state, *args, **kwargs):
        _check_no_collectives_before(state)
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            return _run_to_the_end(func, state, *args, **kwargs)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


@functools.cache
def _collectives_before_first_run():
    # Cached: those of a run are no longer before it.
    return graph.number_of_collectives()


def _check_no_collectives_before(state):
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


def _run_to_the_end(func, state, *args, **kwargs):
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
        # Horovod changes its variables in C, which Python does not see.
        launchers.assign(rank=hvd.rank(), size=hvd.size())
        state.on_reset()


@contextlib.contextmanager
def _collective_failures():
    try:
        yield
    except tf.errors.OpError as error:
        if is_collective_failure(error):
            raise HorovodInternalError(str(error)) from error
        raise
