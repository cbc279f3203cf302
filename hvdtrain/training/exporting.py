"""Exports of the evaluated model, each complete or absent.

    MODEL_DIR/export/best/step-00000300/     a SavedModel, for `tf.saved_model.load`

Each is written to a temporary directory, synchronized to the disk and renamed.
An `Exporter` says when the model is exported; `Exports` writes.
"""

import dataclasses
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from hvdtrain.checkpoint.header import Evaluation
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import fail_together
from hvdtrain.job.files import (
    atomic_directory,
    one_line_errors,
    remove_directory,
    remove_partial,
)
from hvdtrain.keras import metrics
from hvdtrain.stores.mirror import local_directory
from hvdtrain.training.observers import error_reason, notify


@dataclasses.dataclass(frozen=True)
class Exporter:
    """When the evaluated model is exported, and where.

    Attributes:
        name: of its directory in MODEL_DIR/export.
        exports_to_keep: number of the newest exports that are kept.
    """

    name: str
    _: dataclasses.KW_ONLY
    exports_to_keep: int = 5

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise JobError(
                f"Received name={self.name!r} for an exporter; expected the name of a "
                "directory, of letters, digits, '_', '-' and '.'."
            )
        if self.exports_to_keep < 1:
            raise JobError(
                f"Received exports_to_keep={self.exports_to_keep}; expected 1 or more."
            )

    def check_metrics(self, names: Sequence[str]) -> None:
        """Raise `JobError` if the exporter needs a metric that is not in `names`."""

    def is_due(self, evaluations: Sequence[Evaluation], *, is_last: bool) -> bool:
        """Return whether the model of the last evaluation is exported.

        The evaluations are from the whole job so far. The last may end the training.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LatestExporter(Exporter):
    """Exports after each evaluation."""

    name: str = "latest"

    def is_due(self, evaluations: Sequence[Evaluation], *, is_last: bool) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class FinalExporter(Exporter):
    """Exports at the end of the training."""

    name: str = "final"

    def is_due(self, evaluations: Sequence[Evaluation], *, is_last: bool) -> bool:
        return is_last


@dataclasses.dataclass(frozen=True)
class BestExporter(Exporter):
    """Exports after an evaluation that is better than all earlier ones of the job.

    With the `mode` "min", a smaller `metric` is better; with "max", a larger one.
    """

    name: str = "best"
    _: dataclasses.KW_ONLY
    metric: str = "loss"
    mode: str = "min"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in ("min", "max"):
            raise JobError(f"Received mode={self.mode!r}; expected 'min' or 'max'.")

    def check_metrics(self, names: Sequence[str]) -> None:
        if self.metric not in names:
            raise JobError(
                f"Received metric={self.metric!r} for BestExporter; expected one of "
                f"the model's metrics: {', '.join(names)}."
            )

    def is_due(self, evaluations: Sequence[Evaluation], *, is_last: bool) -> bool:
        sign = 1 if self.mode == "min" else -1
        # A job that was continued may have had other metrics before.
        *earlier, value = [
            sign * float(evaluation["metrics"].get(self.metric, math.nan))
            for evaluation in evaluations
        ]
        best = min((v for v in earlier if not math.isnan(v)), default=math.inf)
        return value < best


BY_NAME: dict[str, Callable[[], Exporter]] = {
    "best": BestExporter,
    "latest": LatestExporter,
    "final": FinalExporter,
}


_DIRECTORY = "export"
_STEP = re.compile(r"step-(\d{8,})")


class Exports:
    """The exports of a job, which one process writes.

    During the training, an export that cannot be written is reported and training
    goes on. At the last step it is an error, which `check` raises. It is called after
    the last checkpoint, from which a second call of the job writes the missing export.

    MODEL_DIR/export holds a directory for each exporter.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        exporters: Sequence[Exporter],
        observers: Sequence[object],
    ) -> None:
        self._model_dir = os.fspath(model_dir)
        self._directory = local_directory(model_dir) / _DIRECTORY
        self._exporters = exporters
        self._observers = observers
        self._error: JobError | None = None

    def prepare(self) -> None:
        """Create the directories, and delete the leftovers of a killed writer."""
        for exporter in self._exporters:
            directory = self._directory / exporter.name
            with _one_line_errors(directory):
                directory.mkdir(parents=True, exist_ok=True)
                remove_partial(directory)

    def write(
        self, model: keras.Model, evaluations: Sequence[Evaluation], *, is_last: bool
    ) -> None:
        """Write the exports that are due after the last of `evaluations`."""
        step = evaluations[-1]["step"]
        for exporter in self._exporters:
            if exporter.is_due(evaluations, is_last=is_last):
                self._write(model, exporter, step, is_last=is_last)

    def write_missing(
        self, model: keras.Model, evaluations: Sequence[Evaluation]
    ) -> None:
        """Write the exports of the last step that are due and missing."""
        step = evaluations[-1]["step"]
        for exporter in self._exporters:
            is_due = exporter.is_due(evaluations, is_last=True)
            if is_due and not self._path(exporter, step).is_dir():
                self._write(model, exporter, step, is_last=True)

    def check(self) -> None:
        """Raise `JobError` if an export of the last step could not be written."""
        if self._error:
            raise self._error

    def _write(
        self, model: keras.Model, exporter: Exporter, step: int, *, is_last: bool
    ) -> None:
        path = self._path(exporter, step)
        start = time.monotonic()
        try:
            with _one_line_errors(path):
                with atomic_directory(path) as temporary:
                    model.export(temporary, verbose=False)
                _delete_others(path.parent, step, keep=exporter.exports_to_keep)
        except JobError as error:
            text = f"not written: {error}"
            if is_last:
                self._error = error
        else:
            seconds = time.monotonic() - start
            # In model_dir, which may be an address.
            place = os.path.join(self._model_dir, _DIRECTORY, exporter.name, path.name)
            text = f"written to {place} in {seconds:.1f} s"
        notify(self._observers, "on_export", step, text)

    def _path(self, exporter: Exporter, step: int) -> pathlib.Path:
        return self._directory / exporter.name / f"step-{step:08}"


def prepare(
    exporters: Sequence[Exporter],
    model: keras.Model,
    world: World,
    observers: Sequence[object],
    *,
    model_dir: str | None,
) -> Exports | None:
    """Check the exporters, and prepare their directories on the chief.

    Return None without exporters, and on other ranks than the chief. A collective, if
    there are exporters: they are the same on all ranks. The model's metrics are built.

    Raises:
        JobError: on all ranks, if the exports could not be written.
    """
    if not exporters:
        return None
    exports = None
    with fail_together(world):
        directory = _checked_directory(exporters, model, model_dir)
        if world.is_chief:
            exports = Exports(directory, exporters, observers)
            exports.prepare()
    return exports


def _checked_directory(
    exporters: Sequence[Exporter], model: keras.Model, model_dir: str | None
) -> str:
    if not model_dir:
        raise JobError(
            "Received exporters without a model_dir; expected the directory in which "
            "exports are written: RunConfig(model_dir=...)."
        )
    names = [exporter.name for exporter in exporters]
    if len({*names}) < len(names):
        raise JobError(
            f"Received exporters with the names {', '.join(names)}; expected a "
            "different name, and so a directory, for each."
        )
    states = metrics.local_states(metrics.metric_variables(model.metrics))
    results = metrics.results(model.metrics, states)
    for exporter in exporters:
        exporter.check_metrics([k for k, v in results.items() if isinstance(v, float)])
    return model_dir


def _delete_others(directory: pathlib.Path, newest: int, *, keep: int) -> None:
    """Delete all exports but the newest `keep` up to the step `newest`.

    A killed run wrote the later ones, after the checkpoint from which this continues.
    """
    matches = [_STEP.fullmatch(path.name) for path in directory.iterdir()]
    steps = {int(match[1]): directory / match[0] for match in matches if match}
    kept = sorted((step for step in steps if step <= newest), reverse=True)[:keep]
    for step, path in steps.items():
        if step not in kept:
            remove_directory(path)


def _one_line_errors(path: pathlib.Path) -> AbstractContextManager[None]:
    # Any exception: an export traces the layers of the user's model.
    return one_line_errors(
        f"write {path}",
        errors=(Exception,),
        remedy="expected a model that Keras' export can save, and a directory with "
        "free space that this user can write",
        reason_of=_reason,
    )


def _reason(error: Exception) -> str:
    if isinstance(error, tf.errors.OpError | OSError):
        return error_reason(error) or str(error)
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
