"""Saving of the full model by rank 0, to which the other ranks send their shards.

Keras saves on one rank, variable by variable. Rank 0 runs this in a thread: each
sharded variable that Keras reads is a request, which all ranks answer by a gather. So
one full variable at a time is in memory, in whatever order Keras saves them.
"""

import functools
import queue
import threading
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.dtypes import local_shard
from hvdtrain.collectives.objects import broadcast_object
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import (
    get_inner_optimizer,
    optimizers_inside,
    shard_slots,
)
from hvdtrain.sharding.full_values import FullValues, FullVariable
from hvdtrain.sharding.optimizer_checks import check_takes_shards
from hvdtrain.sharding.shards import assign_shard, get_sharding, is_sharded

# Where Keras saves variables, by number.
Store: TypeAlias = MutableMapping[str, np.ndarray]
Variables: TypeAlias = Iterable[keras.Variable]

# Requests that are not the number of a variable.
_DONE, _WORKING = -1, -2
# Rank 0 may be busy for long, with compression for example. The other ranks would be
# taken for stalled in a longer wait.
_POLL_SECONDS = 5.0
# The call of `save_together` in this process.
_active: list["_Saving"] = []


def full_value(variable: keras.Variable) -> np.ndarray:
    """Return the full value of a variable that is being saved.

    Raises:
        RuntimeError: it is sharded, and the other ranks do not take part.
    """
    if get_sharding(variable) is None:
        return variable.numpy()
    if not _active:
        raise RuntimeError(
            f"{variable.path} is sharded over ranks, which save it together. Call "
            "model.save or model.save_weights on all ranks; rank 0 writes the file."
        )
    return _active[-1].request(variable)


def install() -> None:
    """Make optimizers save full values, and load and find the shards of them.

    The methods of the class are replaced: Keras itself makes the optimizer of a model
    that it loads, before it reads the state.
    """
    cls = keras.optimizers.Optimizer

    @functools.wraps(cls.save_own_variables)
    def save(self: keras.optimizers.Optimizer, store: Store) -> None:
        if _has_sharded_slots(self):
            save_full(self.variables, store)
        else:
            save_by_keras(self, store)

    @functools.wraps(cls.load_own_variables)
    def load(self: keras.optimizers.Optimizer, store: Store) -> None:
        # If the lengths differ, Keras loads nothing, and prints a warning.
        if _has_sharded_slots(self) and len(store.keys()) == len(self.variables):
            load_shards(self.variables, store)
        else:
            load_by_keras(self, store)

    @functools.wraps(cls._var_key)
    def key(self: keras.optimizers.Optimizer, variable: keras.Variable) -> object:
        return key_by_keras(self, local_shard(variable))

    @functools.wraps(cls.build)
    def build(self: keras.optimizers.Optimizer, variables: Variables) -> None:
        # Those inside of a wrapper are built with the shards.
        if optimizers_inside(self) == [self]:
            check_takes_shards(self, variables)
        build_by_keras(self, variables)

    build_by_keras = replace(cls, "build", build, by=install)
    key_by_keras = replace(cls, "_var_key", key, by=install)
    save_by_keras = replace(cls, "save_own_variables", save, by=install)
    load_by_keras = replace(cls, "load_own_variables", load, by=install)


def mark_sharded_slots(optimizer: keras.optimizers.Optimizer) -> None:
    """Set the shardings of slots, which a plain optimizer does not set when built."""
    base = get_inner_optimizer(optimizer)
    if base.built:
        shard_slots(base, base._trainable_variables)


def _has_sharded_slots(optimizer: keras.optimizers.Optimizer) -> bool:
    mark_sharded_slots(optimizer)
    return is_sharded(optimizer.variables)


def load_shards(variables: Iterable[keras.Variable], store: Store) -> None:
    """Assign this rank's shards of full values, which are stored by number."""
    for i, variable in enumerate(variables):
        assign_shard(variable, store[str(i)])


def is_saving() -> bool:
    """Return whether `save_together` runs its `save` in this process, rank 0."""
    return bool(_active)


def is_in_saving_thread() -> bool:
    """Return whether the `save` of `save_together` calls this."""
    return any(saving.thread is threading.current_thread() for saving in _active)


def save_full(variables: Iterable[keras.Variable], store: Store) -> None:
    """Store the full values of variables by their number, as Keras does."""
    for i, variable in enumerate(variables):
        store[str(i)] = full_value(variable)


def save_together(
    variables: Sequence[keras.Variable], save: Callable[[], None]
) -> None:
    """Call `save()` on rank 0, where `full_value` then works. A collective.

    `variables` are all sharded ones, in one order on all ranks.

    Raises:
        RuntimeError: on the other ranks, if `save()` raises an exception on rank 0.
    """
    values = FullValues(map(FullVariable.of, variables))
    saving = None
    if global_process_set.rank() == 0:
        saving = _Saving(variables, save)
    try:
        while (request := _agree_on_request(saving)) != _DONE:
            if request != _WORKING:
                value = values.gather(request)
                if saving:
                    saving.reply(value)
    finally:
        # After a failed collective, the thread would block in its request for ever.
        if saving:
            saving.reply(None)
    # As text: an exception may hold objects that cannot be pickled.
    error = saving and saving.error
    text = error and f"{type(error).__name__}: {error}"
    text = broadcast_object(text, name="SavingError")
    if error:
        raise error
    if text:
        raise RuntimeError(f"Rank 0 could not save the model: {text}")


def _agree_on_request(saving: "_Saving | None") -> int:
    request = saving.next_request() if saving else _DONE
    return int(transport.broadcast(tf.constant(request), 0, name="SavingRequest"))


class _Saving:
    def __init__(
        self, variables: Sequence[keras.Variable], save: Callable[[], None]
    ) -> None:
        self._numbers = {id(variable): i for i, variable in enumerate(variables)}
        self._requests: queue.Queue[int] = queue.Queue()
        # None ends a request without a value.
        self._replies: queue.Queue[np.ndarray | None] = queue.Queue()
        self._save = save
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def request(self, variable: keras.Variable) -> np.ndarray:
        """Return the full value. Is called in the thread."""
        self._requests.put(self._numbers[id(variable)])
        value = self._replies.get()
        if value is None:
            raise RuntimeError("The other ranks no longer send their shards.")
        return value

    def next_request(self) -> int:
        """Return the number of a variable, _WORKING or _DONE."""
        try:
            return self._requests.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return _WORKING

    def reply(self, value: np.ndarray | None) -> None:
        self._replies.put(value)

    def _run(self) -> None:
        _active.append(self)
        try:
            self._save()
        # SystemExit too: the main thread raises it again.
        except BaseException as error:
            self.error = error
        finally:
            _active.remove(self)
            self._requests.put(_DONE)
