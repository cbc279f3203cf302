"""The best model so far, written by rank 0."""

import horovod.tensorflow as hvd
import keras

from hvdtrain.job.files import atomic_write


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Writes the best model of a run to one file, on rank 0.

    A `keras.callbacks.ModelCheckpoint(save_best_only=True)` for all ranks. Put it
    after `MetricAverageCallback`, so that the monitored value is that of all ranks'
    samples. The file is replaced by an atomic rename: a job that is killed leaves the
    previous best model, never a partial file. As in Horovod, `filepath` may be set as
    an attribute before `fit`.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as in
            `keras.callbacks.ModelCheckpoint`.
        filepath: the file, which ends in `.keras`, or in `.weights.h5` with
            `save_weights_only`.

    Raises:
        ValueError: for another ending; in `fit`, if `filepath` is missing.
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
            # Keras requires a name here; on_train_begin checks that it was replaced.
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
        """Takes the model, with atomic writes."""
        super().set_model(_AtomicallyWritten(model))

    def on_train_begin(self, logs=None):
        """Checks that `filepath` is set."""
        super().on_train_begin(logs)
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint has no file to write. Received: filepath=None. "
                "Pass filepath=... or set its attribute filepath before fit."
            )

    def on_train_batch_end(self, batch, logs=None):
        """Saves every `save_freq` batches, if it is a number."""
        if hvd.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        """Saves after each epoch, if `save_freq` is "epoch"."""
        if hvd.rank() == 0:
            super().on_epoch_end(epoch, logs)


class _AtomicallyWritten:
    """A model whose files are written atomically; otherwise the model itself."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        # copy and pickle look up special methods before __init__ has set _model.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def save(self, path, **options):
        self._write(self._model.save, path, options)

    def save_weights(self, path, **options):
        self._write(self._model.save_weights, path, options)

    def _write(self, save, path, options):
        if "://" in str(path):  # Keras writes a local file and uploads it.
            save(path, **options)
            return
        with atomic_write(path) as temporary:
            save(temporary, **options)
