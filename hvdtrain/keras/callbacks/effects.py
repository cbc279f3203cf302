"""Which callbacks must be on all ranks, and which on one rank only.

A callback of Keras acts on its own rank: one that changes weights belongs on every
rank, and one that writes a file on one.
"""

import collections
import inspect
import os
import socket
import string
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from hvdtrain.collectives.objects import name_ranks
from hvdtrain.keras.callbacks.learning_rate import LearningRateScheduleCallback
from hvdtrain.keras.sharded_models import is_saved_by_rank_0


def _names_metrics(checkpoint: keras.callbacks.ModelCheckpoint) -> bool:
    """Return whether logs of batches decide when a checkpoint is saved, or its name."""
    fields = {field for _, field, _, _ in string.Formatter().parse(checkpoint.filepath)}
    has_metric = checkpoint.save_best_only or fields - {"epoch", "batch", None}
    return checkpoint.save_freq != "epoch" and bool(has_metric)


class Effect(NamedTuple):
    """What a callback does beside reading the logs of epochs.

    Attributes:
        path: the attribute with the path that it writes to. The files of TensorBoard
            have different names on all ranks.
        changes: whether it changes weights or learning rates.
        stops: whether it ends the training, and restores weights then.
        reads_batches: whether the logs of batches decide what it writes.
    """

    path: str = ""
    changes: bool = False
    stops: bool = False
    reads_batches: Callable[[Any], bool] = lambda _: False


# Of the callbacks of Keras, and ours that are no `SharedCallback`. What LambdaCallback
# does is not known.
EFFECTS: dict[type, Effect] = {
    keras.callbacks.BackupAndRestore: Effect(path="backup_dir"),
    keras.callbacks.CSVLogger: Effect(path="filename"),
    keras.callbacks.EarlyStopping: Effect(stops=True),
    keras.callbacks.History: Effect(),
    keras.callbacks.LambdaCallback: Effect(),
    keras.callbacks.LearningRateScheduler: Effect(changes=True),
    keras.callbacks.ModelCheckpoint: Effect(
        path="filepath", reads_batches=_names_metrics
    ),
    keras.callbacks.ProgbarLogger: Effect(),
    keras.callbacks.ReduceLROnPlateau: Effect(changes=True),
    keras.callbacks.RemoteMonitor: Effect(),
    keras.callbacks.SwapEMAWeights: Effect(changes=True),
    keras.callbacks.TensorBoard: Effect(
        reads_batches=lambda board: board.update_freq != "epoch"
    ),
    keras.callbacks.TerminateOnNaN: Effect(stops=True),
    LearningRateScheduleCallback: Effect(changes=True),
}
if hasattr(keras.callbacks, "OrbaxCheckpoint"):
    EFFECTS[keras.callbacks.OrbaxCheckpoint] = Effect(path="directory")


def _effect(callback: keras.callbacks.Callback) -> Effect:
    kinds = (kind for kind in type(callback).__mro__ if kind in EFFECTS)
    return EFFECTS.get(next(kinds, object), Effect())


def changing_callbacks(
    callbacks: Iterable[keras.callbacks.Callback], *, stops_together: bool
) -> list[str]:
    """Return the names of callbacks by which the ranks' trainings would differ.

    Args:
        callbacks: the callbacks of this rank.
        stops_together: whether all ranks stop when a callback stops one of them, and
            take the weights that it restores: see `StopTogetherCallback`.
    """
    return [
        type(callback).__name__
        for callback in callbacks
        if (effect := _effect(callback)).changes
        or (effect.stops and not stops_together)
    ]


def warn_of_batch_logs(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Warn of callbacks that decide by logs within an epoch, which differ by rank."""
    names = [type(c).__name__ for c in callbacks if _effect(c).reads_batches(c)]
    if names:
        warnings.warn(
            "Logs within an epoch are computed from the samples of one rank; logs of "
            "an epoch, from all ranks. Received callbacks that use the former: "
            f"{', '.join(names)}. Pass "
            'save_freq="epoch" to ModelCheckpoint, or update_freq="epoch" to '
            "TensorBoard.",
            stacklevel=2,
        )


def callbacks_beside(
    callback: keras.callbacks.Callback,
) -> Sequence[keras.callbacks.Callback]:
    """Return the callbacks of the `fit` that has called a method of `callback`."""
    # Keras passes the list to no callback. Without a frame, Python 3.11 skips three.
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            return owner.callbacks
    return ()


class Writer(NamedTuple):
    """A callback that writes a file, and its host; "" for a file in a store."""

    name: str
    host: str


# By the path that is written to.
Writers = Mapping[str, Writer]


def find_writers(
    callbacks: Iterable[keras.callbacks.Callback], model: keras.Model
) -> dict[str, Writer]:
    """Return the callbacks that write files on this rank, by path."""
    writers = {}
    for callback in callbacks:
        kind = type(callback)
        if kind is keras.callbacks.ModelCheckpoint and is_saved_by_rank_0(model):
            continue
        # A class that is derived may write on rank 0 alone.
        if name := EFFECTS.get(kind, Effect()).path:
            path = str(getattr(callback, name))
            path = path if "://" in path else os.path.abspath(path)
            # Not /dev/null, or a pipe.
            if not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path):
                host = "" if "://" in path else socket.gethostname()
                writers[path] = Writer(kind.__name__, host)
    return writers


def written_twice(writers_by_rank: Sequence[Writers], ranks: Sequence[int]) -> str:
    """Return the text of an error: which files several ranks write; "" if none.

    Ranks of several hosts are not compared: each host may have a disk of its own.
    """
    found = collections.defaultdict(list)
    for rank, writers in zip(ranks, writers_by_rank, strict=True):
        for path, writer in writers.items():
            found[writer, path].append(rank)
    texts = [
        f"{writer.name} with {path} on {name_ranks(of_path)}"
        for (writer, path), of_path in found.items()
        if len(of_path) > 1
    ]
    if not texts:
        return ""
    return (
        "Several ranks write one file, at the same time. "
        f"Received: {'; '.join(texts)}. Pass such callbacks to fit on rank 0 alone, or "
        "with a path of its own on each rank."
    )
