"""The best model so far, written by rank 0."""

import os
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvdtrain.job.files import atomic_write
from hvdtrain.keras.sharded_models import is_saved_together


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keeps the best model of a run in one file, which rank 0 writes.

    A `keras.callbacks.ModelCheckpoint(save_best_only=True)` for all ranks. Put it
    after `MetricAverageCallback`: "best" is then measured on the samples of all ranks.
    Files are replaced by an atomic rename, so a job that is killed leaves a complete
    one. A model that is sharded over ranks is saved by all of them together: put
    `MetricAverageCallback` before, without which they would not decide alike. As in
    Horovod, `filepath` may be set as an attribute before `fit`.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as in
            `keras.callbacks.ModelCheckpoint`.
        filepath: the file, which ends in `.keras`, or in `.weights.h5` with
            `save_weights_only`.

    Raises:
        ValueError: for a name with another ending; in `fit`, if there is none.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: int | str = "epoch",
        filepath: str | os.PathLike | None = None,
    ) -> None:
        super().__init__(
            # Keras requires a name here; on_train_begin checks that one was given.
            filepath or (".weights.h5" if save_weights_only else ".keras"),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def set_model(self, model: keras.Model) -> None:
        super().set_model(_AtomicallySaved(model))

    def on_train_begin(self, logs: dict | None = None) -> None:
        super().on_train_begin(logs)
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint has no file to write. Pass filepath=... or set "
                "its attribute filepath before fit."
            )

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._takes_part():
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self._takes_part():
            super().on_epoch_end(epoch, logs)

    def _takes_part(self) -> bool:
        # A sharded model is saved by a collective: all ranks must decide alike, and do
        # so where their metrics are equal.
        return hvd.rank() == 0 or is_saved_together(self.model)


class _AtomicallySaved:
    """A model whose `save` methods write by an atomic rename."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up special methods before __init__ has set the model.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def save(self, path: str | os.PathLike, **options: Any) -> None:
        self._write(self._model.save, path, options)

    def save_weights(self, path: str | os.PathLike, **options: Any) -> None:
        self._write(self._model.save_weights, path, options)

    def _write(
        self,
        save: Callable[..., None],
        path: str | os.PathLike,
        options: dict[str, Any],
    ) -> None:
        # Keras writes a local file and uploads it; ranks other than 0 write none.
        if "://" in str(path) or hvd.rank() > 0:
            save(path, **options)
            return
        with atomic_write(path) as temporary:
            save(temporary, **options)
