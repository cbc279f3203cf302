"""The best model so far, written by rank 0."""

import horovod.tensorflow as hvd
import keras

from hvdtrain.job.files import atomic_write
from hvdtrain.keras.collective_calls import is_saved_together


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keeps the best model of a run in one file, which rank 0 writes.

    A `keras.callbacks.ModelCheckpoint(save_best_only=True)` for all ranks. Put it
    after `MetricAverageCallback`: "best" is then measured on the samples of all ranks.
    Files are replaced by an atomic rename, so a job that is killed leaves a complete
    one. A model that is divided over ranks is saved by all of them together: put
    `MetricAverageCallback` before, which they need to decide alike. As in Horovod,
    `filepath` may be set as an attribute before `fit`.

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
        monitor="val_loss",
        verbose=0,
        save_weights_only=False,
        mode="auto",
        save_freq="epoch",
        filepath=None,
    ):
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

    def set_model(self, model):
        """Takes the model, to be written by an atomic rename."""
        super().set_model(_AtomicallySaved(model))

    def on_train_begin(self, logs=None):
        """Checks that there is a file to write."""
        super().on_train_begin(logs)
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint has no file to write. Pass filepath=... or set "
                "its attribute filepath before fit."
            )

    def on_train_batch_end(self, batch, logs=None):
        """Saves after so many batches, if `save_freq` is a number."""
        if self._takes_part():
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        """Saves after an epoch, if `save_freq` is "epoch"."""
        if self._takes_part():
            super().on_epoch_end(epoch, logs)

    def _takes_part(self):
        # The decision of all ranks: it needs metrics that are equal on them.
        return hvd.rank() == 0 or is_saved_together(self.model)


class _AtomicallySaved:
    """A model whose `save` methods write by an atomic rename."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        # copy and pickle look up special methods before __init__ has set the model.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def save(self, path, **options):
        self._write(self._model.save, path, options)

    def save_weights(self, path, **options):
        self._write(self._model.save_weights, path, options)

    def _write(self, save, path, options):
        # Keras writes a local file and uploads it; a rank but 0 writes none.
        if "://" in str(path) or hvd.rank() > 0:
            save(path, **options)
            return
        with atomic_write(path) as temporary:
            save(temporary, **options)
