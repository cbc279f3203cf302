"""Values by which callbacks decide, such as whether a training stops.

They are computed at the end of an epoch, which may have more steps than are recorded:
after the last one, `fit` ends the epoch early, and evaluates a few batches.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from hvdtrain.keras.seams import replace
from hvdtrain.verify.step_recorder import FinishedError
from hvdtrain.verify.trajectory import Directory

_DECIDING = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
_EVALUATED_BATCHES = 10


class Decisions:
    """Writes what callbacks monitor, and ends the script after an epoch.

    Args:
        files: the files of the phase "ranks".
    """

    def __init__(self, files: Directory, *, rank: int) -> None:
        self._files = files
        self._rank = rank
        self._monitored: dict[str, list[float]] = {}
        self._fitted: list[keras.Model] = []
        self._is_ending = False

    @contextmanager
    def fit(self, model: keras.Model) -> Iterator[None]:
        """Note that Keras' `fit` of a model is running in the block."""
        self._fitted.append(model)
        try:
            yield
        finally:
            self._fitted.pop()

    def end_epoch(self, callbacks: keras.callbacks.CallbackList) -> bool:
        """Make `fit` end its epoch, if a callback decides at its end."""
        if self._fitted and any(isinstance(c, _DECIDING) for c in callbacks.callbacks):
            self._is_ending = self._fitted[-1].stop_training = True
        return self._is_ending

    def note(self, name: str, logs: Any) -> None:
        """Note a value at the end of an epoch."""
        if name in (logs or {}):
            self._monitored.setdefault(name, []).append(float(logs[name]))
            # A rank that stops alone ends the others by an error.
            self._files.write("monitored", self._rank, value=self._monitored)

    def note_evaluation(self, batch: int) -> None:
        """End an evaluation after a few batches, once the last step is done."""
        if self._is_ending and batch + 1 >= _EVALUATED_BATCHES:
            self._fitted[-1].stop_evaluating = True

    def note_epoch(self) -> None:
        """End the script, once the last step is done."""
        if self._is_ending:
            raise FinishedError


def note_decisions(decisions: Decisions) -> None:
    """Make `decisions` see the calls of `fit` and of its callbacks."""
    fit, callbacks = keras.Model.fit, keras.callbacks.CallbackList
    on_train_batch_end = callbacks.on_train_batch_end

    @functools.wraps(fit)
    def fit_and_note(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        with decisions.fit(self):
            return fit(self, *args, **kwargs)

    @functools.wraps(on_train_batch_end)
    def end_step(
        self: keras.callbacks.CallbackList, batch: int, logs: Any = None
    ) -> None:
        try:
            on_train_batch_end(self, batch, logs)
        except FinishedError:
            if not decisions.end_epoch(self):
                raise

    replace(keras.Model, "fit", fit_and_note, by=note_decisions)
    replace(callbacks, "on_train_batch_end", end_step, by=note_decisions)
    _call_around(
        callbacks,
        "on_test_batch_end",
        after=lambda _, batch, logs=None: decisions.note_evaluation(batch),
    )
    _call_around(
        callbacks, "on_epoch_end", after=lambda *_, **__: decisions.note_epoch()
    )
    for kind in _DECIDING:
        _call_around(
            kind,
            "on_epoch_end",
            before=lambda callback, epoch, logs=None: decisions.note(
                callback.monitor, logs
            ),
        )


def _call_around(
    owner: type,
    name: str,
    *,
    before: Callable[..., None] = lambda *_, **__: None,
    after: Callable[..., None] = lambda *_, **__: None,
) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> None:
        before(*args, **kwargs)
        method(*args, **kwargs)
        after(*args, **kwargs)

    replace(owner, name, call, by=note_decisions)
