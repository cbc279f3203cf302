"""The loop around a training function that starts it again after a change."""

import contextlib
import functools

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.elastic import notification_manager
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from hvdtrain.collectives.failures import is_collective_failure
from hvdtrain.job.backend import init


def run(func):
    """Makes `func(state, ...)` survive changes of the job.

    Decorate the function that trains. Before it is called, every worker takes rank
    0's state. When a collective fails because a worker is gone, the others go back
    to the last commit, form a new job, and call it again; when workers come or leave
    in order, without going back.

    Args:
        func: takes a `KerasState` (or another state of Horovod's) first.

    Returns:
        A function that returns what `func` returns when it has come to its end.

    Raises:
        Exception: whatever `func` raises that is not a failed collective.
    """

    @functools.wraps(func)
    def wrapper(state, *args, **kwargs):
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            return _run_to_the_end(func, state, *args, **kwargs)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


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
        state.on_reset()


@contextlib.contextmanager
def _collective_failures():
    try:
        yield
    except tf.errors.OpError as error:
        if is_collective_failure(error):
            raise HorovodInternalError(str(error)) from error
        raise
