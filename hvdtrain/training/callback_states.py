"""The states of callbacks in checkpoints.

Of Keras' callbacks the attributes in `_ATTRIBUTES` are saved: the others are arguments,
which a later run may choose anew, or belong to the process, such as open files. Other
callbacks are saved if they have the methods `get_state()` and `set_state(state)`.

A state consists of numbers, strings, None, arrays, and lists, tuples and dictionaries
of them. It is stored as JSON, in which arrays are numbered.
"""

import dataclasses
import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint.header import CALLBACKS_JSON, Arrays
from hvdtrain.job import JobError

_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: (
        *("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    ),
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.ModelCheckpoint: (
        *("best", "_batches_seen_since_last_saving", "_current_epoch"),
        "_last_batch_seen",
    ),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_test_batch", "_global_train_batch"),
}
_METHODS, _OF_KERAS = "methods", "attributes"
_ARRAY, _TUPLE = "hvdtrain.array", "hvdtrain.tuple"
# What a file of arrays can contain.
_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64"),
}


class _NoStateError(TypeError):
    """A value of this type cannot be part of a state."""


@dataclasses.dataclass(frozen=True)
class _State:
    """A state as it is stored; `arguments` are those of `_arguments`."""

    kind: str
    values: Any
    arguments: list[str]


class CallbackStates:
    """The states of the callbacks of a user on this rank.

    Args:
        callbacks: they have the model, and their training has not begun.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self._callbacks = callbacks
        # Of callbacks whose state is not saved, until the first checkpoint.
        self._unsaved = [
            (callback, dict(_numbers(callback)))
            for callback in callbacks
            if not _attribute_names(callback) and not _has_methods(callback)
        ]

    def capture(self) -> dict[str, np.ndarray]:
        """Return the states, as copies."""
        self._warn_of_unsaved()
        arrays: dict[str, np.ndarray] = {}
        states = []
        for callback in self._callbacks:
            state = _read(callback)
            if state is not None:
                kind = _METHODS if _has_methods(callback) else _OF_KERAS
                try:
                    encoded = _encode(state, arrays)
                except _NoStateError as error:
                    _warn_of_type(callback, error)
                    kind, encoded = "", None
                states.append(
                    [type(callback).__name__, kind, encoded, _arguments(callback)]
                )
        arrays[CALLBACKS_JSON] = np.frombuffer(json.dumps(states).encode(), "uint8")
        return {name: np.array(array) for name, array in arrays.items()}

    def restore(self, arrays: Arrays, *, of_files: bool = False) -> None:
        """Set the states that `capture` has returned, perhaps in another process.

        The callbacks of a class are found by what they monitor and by their files, then
        by their order. Callbacks of which there is no state start anew, with a warning.

        Args:
            of_files: whether to restore `ModelCheckpoint` alone, whose `best` is of a
                file that it would replace by a worse one.
        """
        if CALLBACKS_JSON not in arrays:
            return
        present = [
            callback
            for callback in self._callbacks
            if not of_files or isinstance(callback, keras.callbacks.ModelCheckpoint)
        ]
        stored: dict[str, list[_State]] = {}
        for name, *state in json.loads(arrays[CALLBACKS_JSON].tobytes()):
            stored.setdefault(name, []).append(_State(*state))
        for name, states in stored.items():
            callbacks = [c for c in present if type(c).__name__ == name]
            for callback, state in _paired(callbacks, states):
                _set(callback, state.kind, state.values, arrays)

    def _warn_of_unsaved(self) -> None:
        unsaved, self._unsaved = self._unsaved, []
        for callback, before in unsaved:
            now = dict(_numbers(callback))
            names = [name for name in now if now[name] != before.get(name)]
            if names:
                warnings.warn(
                    "Checkpoints do not contain the state of the callback "
                    f"{type(callback).__name__}, of which {', '.join(sorted(names))} "
                    "changed: in a job that continues, it starts anew. Give it the "
                    "methods get_state() and set_state(state).",
                    stacklevel=2,
                )


def _arguments(callback: keras.callbacks.Callback) -> list[str]:
    """Return the arguments that tell callbacks of Keras apart, the file last."""
    if not _attribute_names(callback):
        return []
    names = ("monitor", "mode", "filepath")
    return [str(vars(callback).get(name, "")) for name in names]


def _paired(
    callbacks: Sequence[keras.callbacks.Callback], states: Sequence[_State]
) -> Iterator[tuple[keras.callbacks.Callback, _State]]:
    """Yield callbacks of one class and their states; warn of those that have none."""
    left, unused = [], list(states)
    for callback in callbacks:
        arguments = _arguments(callback)
        found = next((s for s in unused if s.arguments == arguments), None)
        if arguments and found:
            unused.remove(found)
            yield callback, found
        else:
            left.append(callback)
    # By their order: the file has another name, or the callbacks are a user's.
    in_order = unused if len(left) == len(unused) else [None] * len(left)
    for callback, state in zip(left, in_order, strict=True):
        if state and state.arguments[:2] == _arguments(callback)[:2]:
            yield callback, state
            continue
        described = ", ".join(filter(None, _arguments(callback)))
        warnings.warn(
            f"The callback {type(callback).__name__}({described}) starts anew: the "
            "checkpoint has no state of a callback with these arguments.",
            stacklevel=3,
        )


def _has_methods(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def check_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raise a `JobError` for a callback that restores a training by itself."""
    if any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks):
        raise JobError(
            "callbacks must not have BackupAndRestore, which restores an epoch: a "
            "checkpoint restores a step. Leave it out; a job with a `model_dir` "
            "continues from its newest checkpoint."
        )


def _attribute_names(callback: keras.callbacks.Callback) -> list[str]:
    """Return the names of the attributes that are the state of a Keras callback."""
    classes = [cls for cls in _ATTRIBUTES if isinstance(callback, cls)]
    names = [name for cls in classes for name in _ATTRIBUTES[cls]]
    return [name for name in names if name in vars(callback)]


def _numbers(callback: keras.callbacks.Callback) -> Iterator[tuple[str, Any]]:
    """Yield attributes that may be a state, apart from arrays, by name.

    Of the callbacks of this package, none needs its state.
    """
    if type(callback).__module__.partition(".")[0] in ("keras", "hvdtrain"):
        return
    for name, value in vars(callback).items():
        if isinstance(value, bool | int | float | str) or value is None:
            yield name, value
        elif isinstance(value, list | dict | set):
            yield name, len(value)


def _read(callback: Any) -> Any:
    """Return the state of a callback, None if there is none to save."""
    if _has_methods(callback):
        return callback.get_state()
    names = _attribute_names(callback)
    return {name: vars(callback)[name] for name in names} if names else None


def _set(callback: Any, kind: str, state: Any, arrays: Arrays) -> None:
    if kind != (_METHODS if _has_methods(callback) else _OF_KERAS):
        return
    try:
        state = _decode(state, arrays)
    except KeyError:
        warnings.warn(
            f"{type(callback).__name__} starts anew: its state has weights of a model "
            "that was sharded over other ranks.",
            stacklevel=3,
        )
        return
    if kind == _METHODS:
        callback.set_state(state)
    else:
        vars(callback).update(state)


def _warn_of_type(callback: keras.callbacks.Callback, error: _NoStateError) -> None:
    warnings.warn(
        f"The state of the callback {type(callback).__name__} has a value of type "
        f"{error}; expected numbers, strings, None, arrays, and lists, tuples and "
        "dictionaries of them. Checkpoints do not contain it.",
        stacklevel=3,
    )


def _encode(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return a value for JSON; add its arrays to `arrays`."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.name not in _DTYPES:
            raise _NoStateError(value.dtype.name)
        arrays[str(len(arrays))] = np.asarray(value)
        return {_ARRAY: len(arrays) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    # A subclass, such as `collections.Counter`, would come back as a plain one.
    if type(value) is list:
        return [_encode(each, arrays) for each in value]
    if type(value) is tuple:
        return {_TUPLE: [_encode(each, arrays) for each in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: _encode(each, arrays) for key, each in value.items()}
    raise _NoStateError(type(value).__name__)


def _decode(value: Any, arrays: Arrays) -> Any:
    if isinstance(value, list):
        return [_decode(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_ARRAY}:
        array = arrays[str(value[_ARRAY])]
        return np.array(array) if array.ndim else array[()]
    if value.keys() == {_TUPLE}:
        return tuple(_decode(each, arrays) for each in value[_TUPLE])
    return {key: _decode(each, arrays) for key, each in value.items()}
