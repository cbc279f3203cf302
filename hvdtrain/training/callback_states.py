"""The states of callbacks in checkpoints.

Callbacks of Keras, and classes derived from them, have their state in attributes. Of
these, the ones that have changed since the callback was made are saved: the others are
arguments, which a later run may choose anew. Other callbacks are saved if they have the
methods `get_state()` and `set_state(state)`.

A state consists of numbers, strings, None, arrays, and lists, tuples and dictionaries
of them. It is stored as JSON, in which arrays are numbered.
"""

import contextlib
import copy
import json
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.training.checkpoint.header import CALLBACKS_JSON, Arrays

_ARRAY, _TUPLE = "hvdtrain.array", "hvdtrain.tuple"
_NUMBERS = "biufc"
# Set by `CallbackList`; and an argument that Keras negates when it first monitors.
_NO_STATE = {"model", "_model", "params", "min_delta"}


class _NoStateError(TypeError):
    """A value cannot be part of a state."""


class CallbackStates:
    """The states of the callbacks of a user on this rank.

    Args:
        callbacks: as they were made; their training has not begun.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self._callbacks = callbacks
        self._made = self._copy_attributes()
        self._begun = self._made
        self._is_warned = False

    def note_begin(self) -> None:
        """Note the attributes that `on_train_begin` has set."""
        self._begun = self._copy_attributes()

    def capture(self) -> dict[str, np.ndarray]:
        """Return the states, as copies."""
        arrays: dict[str, np.ndarray] = {}
        states = []
        for number, callback in enumerate(self._callbacks):
            name = type(callback).__name__
            try:
                state = _encode(self._read(number), arrays)
            except _NoStateError as error:
                state = None
                self._warn(
                    f"{name}.get_state() returned a state with a value of type {error};"
                    " expected numbers, strings, None, arrays, and lists, tuples and "
                    "dictionaries of them. Checkpoints do not contain it."
                )
            states.append({"class": name, "state": state})
        self._warn_of_unsaved()
        self._is_warned = True
        arrays[CALLBACKS_JSON] = np.frombuffer(json.dumps(states).encode(), "uint8")
        return {name: np.array(array) for name, array in arrays.items()}

    def restore(self, arrays: Arrays) -> None:
        """Set the states that `capture` has returned, perhaps in another process.

        The callbacks of a class are found by their order. Of a class with more or fewer
        callbacks than before, all start anew, with a warning.
        """
        if CALLBACKS_JSON not in arrays:
            return
        stored: dict[str, list[Any]] = {}
        for each in json.loads(arrays[CALLBACKS_JSON].tobytes()):
            stored.setdefault(each["class"], []).append(each["state"])
        present: dict[str, list[Any]] = {}
        for callback in self._callbacks:
            present.setdefault(type(callback).__name__, []).append(callback)
        for name in present.keys() & stored.keys():
            if len(present[name]) != len(stored[name]):
                warnings.warn(
                    f"There are {len(present[name])} callbacks of the class {name}, "
                    f"and the checkpoint has the states of {len(stored[name])}: all of "
                    "them start anew.",
                    stacklevel=2,
                )
                continue
            for callback, state in zip(present[name], stored[name], strict=True):
                _set_state(callback, _decode(state, arrays))

    def _copy_attributes(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(_attributes(each)) for each in self._callbacks]

    def _read(self, number: int) -> Any:
        """Return the state of a callback, None if there is none to save."""
        callback: Any = self._callbacks[number]
        if _has_methods(callback):
            return callback.get_state()
        return self._changed(number) if _is_of("keras", callback) else None

    def _changed(self, number: int) -> dict[str, Any]:
        """Return the attributes that are no arguments of the callback."""
        before = self._made[number], self._begun[number]
        return {
            name: value
            for name, value in _attributes(self._callbacks[number]).items()
            if not all(name in old and _is_same(value, old[name]) for old in before)
        }

    def _warn_of_unsaved(self) -> None:
        for number, callback in enumerate(self._callbacks):
            # Of the callbacks of this package, none needs its state.
            is_exempt = any(_is_of(each, callback) for each in ("keras", "hvdtrain"))
            if is_exempt or _has_methods(callback):
                continue
            if names := sorted(self._changed(number)):
                self._warn(
                    "Checkpoints do not contain the state of the callback "
                    f"{type(callback).__name__}, of which {', '.join(names)} changed: "
                    "in a job that continues, it starts anew. Give it the methods "
                    "get_state() and set_state(state)."
                )

    def _warn(self, text: str) -> None:
        if not self._is_warned:
            warnings.warn(text, stacklevel=3)


def _has_methods(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _set_state(callback: Any, state: Any) -> None:
    if _has_methods(callback):
        callback.set_state(state)
    elif state is not None:
        vars(callback).update(state)


def _is_of(library: str, callback: keras.callbacks.Callback) -> bool:
    """Return whether a class of this library, as EarlyStopping, is a base."""
    general = keras.callbacks.Callback, keras.callbacks.LambdaCallback
    return any(
        base.__module__.partition(".")[0] == library and base not in general
        for base in type(callback).__mro__
    )


def _attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Return the attributes that may be part of a state."""
    found = {}
    for name, value in vars(callback).items():
        if name in _NO_STATE:
            continue
        with contextlib.suppress(_NoStateError):
            _encode(value, {})
            found[name] = value
    return found


def _is_same(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, np.ndarray | np.generic):
        is_alike = (value.dtype, value.shape) == (other.dtype, other.shape)
        return is_alike and value.tobytes() == other.tobytes()
    if isinstance(value, dict):
        is_alike = value.keys() == other.keys()
        return is_alike and all(_is_same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return value == other or (value != value and other != other)


def _encode(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return a value for JSON; add its arrays to `arrays`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS:
        arrays[str(len(arrays))] = np.asarray(value)
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, list):
        return [_encode(each, arrays) for each in value]
    if type(value) is tuple:
        return {_TUPLE: [_encode(each, arrays) for each in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
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
