"""Saving of the dense model by rank 0, to which the other ranks send their parts.

Keras saves on one rank, variable by variable. Rank 0 does so in a thread: each divided
variable that it gets to is a request, which all ranks answer together. So one dense
variable at a time is in memory, in whatever order Keras saves them.
"""

import functools
import queue
import threading

import keras
import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.objects import broadcast_object
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import get_inner_optimizer, shard_slots
from hvdtrain.sharding.full_values import FullValues, FullVariable
from hvdtrain.sharding.shards import assign_shard, get_sharding, is_sharded

_DONE, _WORKING = -1, -2
_NO_VALUE = object()
# A long wait would be taken for a rank that hangs.
_POLL_SECONDS = 5.0
# The saving of this process; more than one object only by mistake.
_active = []


def full_value(variable):
    """Returns the dense value of a Keras variable that is being saved.

    Raises:
        RuntimeError: it is divided, and the other ranks do not take part.
    """
    if get_sharding(variable) is None:
        return variable.numpy()
    if not _active:
        raise RuntimeError(
            f"{variable.path} is divided over ranks, which save it together. Call "
            "model.save or model.save_weights on all ranks; rank 0 writes the file."
        )
    return _active[-1].request(variable)


def install():
    """Makes optimizers save dense values, and load their parts of them.

    For the class: Keras itself makes the optimizer of a model that it loads, before it
    reads its state.
    """
    cls = keras.optimizers.Optimizer

    @functools.wraps(cls.save_own_variables)
    def save(self, store):
        if _has_sharded_slots(self):
            save_full(self.variables, store)
        else:
            save_whole(self, store)

    @functools.wraps(cls.load_own_variables)
    def load(self, store):
        # Of another length, Keras loads nothing, and prints a warning.
        if _has_sharded_slots(self) and len(store.keys()) == len(self.variables):
            load_shards(self.variables, store)
        else:
            load_whole(self, store)

    save_whole = replace(cls, "save_own_variables", save, by=install)
    load_whole = replace(cls, "load_own_variables", load, by=install)


def note_slots(optimizer):
    """Notes which slots are parts; those of a plain optimizer are not noted before."""
    base = get_inner_optimizer(optimizer)
    if base.built:
        shard_slots(base, base._trainable_variables)


def _has_sharded_slots(optimizer):
    note_slots(optimizer)
    return is_sharded(optimizer.variables)


def load_shards(variables, store):
    """Assigns this rank's slices of dense values, which are stored by number."""
    for i, variable in enumerate(variables):
        assign_shard(variable, store[str(i)])


def is_saving():
    """Whether rank 0 is saving, in this process, what other ranks send."""
    return bool(_active)


def save_full(variables, store):
    """Stores the dense values of variables by their number, as Keras does."""
    for i, variable in enumerate(variables):
        store[str(i)] = full_value(variable)


def save_together(variables, save):
    """Calls `save()` on rank 0, where `full_value` then works. A collective.

    Args:
        variables: list of all divided variables, the same on all ranks.
        save: function without arguments; not called on the other ranks.

    Raises:
        RuntimeError: on the other ranks, if `save()` raises an exception on rank 0.
    """
    values = FullValues(map(FullVariable.of, variables))
    saving = None
    if global_process_set.rank() == 0:
        saving = _Saving(variables, save)
    try:
        while (request := _agree_on_request(saving)) != _DONE:
            if request == _WORKING:
                continue
            value = values.gather(request)
            if saving:
                saving.reply(value)
    finally:
        # After a failed collective, the thread would wait for its value for ever.
        if saving:
            saving.reply(_NO_VALUE)
    # As text: an exception may hold what cannot be pickled.
    error = saving and saving.error
    text = error and f"{type(error).__name__}: {error}"
    text = broadcast_object(text, name="SavingError")
    if error:
        raise error
    if text:
        raise RuntimeError(f"Rank 0 could not save the model: {text}")


def _agree_on_request(saving):
    request = saving.next_request() if saving else _DONE
    return int(transport.broadcast(tf.constant(request), 0, name="SavingRequest"))


class _Saving:
    """A call of `save` in a thread."""

    def __init__(self, variables, save):
        self._numbers = {id(variable): i for i, variable in enumerate(variables)}
        self._requests, self._replies = queue.Queue(), queue.Queue()
        self._save = save
        self.error = None
        threading.Thread(target=self._run, daemon=True).start()

    def request(self, variable):
        """Returns the dense value; in the thread."""
        self._requests.put(self._numbers[id(variable)])
        value = self._replies.get()
        if value is _NO_VALUE:
            raise RuntimeError("The other ranks no longer send their parts.")
        return value

    def next_request(self):
        """Returns the number of a variable, or what else the other ranks are to do."""
        try:
            return self._requests.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return _WORKING

    def reply(self, value):
        """Answers a request."""
        self._replies.put(value)

    def _run(self):
        _active.append(self)
        try:
            self._save()
        # Of any kind, SystemExit too: it is raised in the main thread.
        except BaseException as error:
            self.error = error
        finally:
            _active.remove(self)
            self._requests.put(_DONE)
