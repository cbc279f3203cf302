"""When the evaluated model is exported: the exporters of TensorFlow's Estimator."""

import dataclasses
import math
import re

from hvdtrain.job import JobError

_NAME = re.compile(r"\w[\w.-]*")


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

    def __post_init__(self):
        """Check name and number."""
        if not _NAME.fullmatch(self.name):
            raise JobError(
                f"Received name={self.name!r} for an exporter; expected the name of a "
                "directory, of letters, digits, '_', '-' and '.'."
            )
        if self.exports_to_keep < 1:
            raise JobError(
                f"Received exports_to_keep={self.exports_to_keep}; expected 1 or more."
            )

    def check_metrics(self, names):
        """Raise `JobError` if the exporter needs a metric that is not in `names`."""

    def is_due(self, evaluations, *, is_last):
        """Return whether the model of the last evaluation is exported.

        Args:
            evaluations: of the whole job so far, dicts of `step` and `metrics`.
            is_last: whether the training ends here.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LatestExporter(Exporter):
    """Exports after each evaluation."""

    name: str = "latest"

    def is_due(self, evaluations, *, is_last):
        """Return True."""
        return True


@dataclasses.dataclass(frozen=True)
class FinalExporter(Exporter):
    """Exports at the end of the training."""

    name: str = "final"

    def is_due(self, evaluations, *, is_last):
        """Return whether the training ends here."""
        return is_last


@dataclasses.dataclass(frozen=True)
class BestExporter(Exporter):
    """Exports after an evaluation that is better than all earlier ones of the job.

    Attributes:
        metric: what decides.
        mode: "min" if smaller is better, or "max".
    """

    name: str = "best"
    _: dataclasses.KW_ONLY
    metric: str = "loss"
    mode: str = "min"

    def __post_init__(self):
        """Check the arguments."""
        super().__post_init__()
        if self.mode not in ("min", "max"):
            raise JobError(f"Received mode={self.mode!r}; expected 'min' or 'max'.")

    def check_metrics(self, names):
        """Raise `JobError` if the metric is not in `names`."""
        if self.metric not in names:
            raise JobError(
                f"Received metric={self.metric!r} for BestExporter; expected one of "
                f"the model's metrics: {', '.join(names)}."
            )

    def is_due(self, evaluations, *, is_last):
        """Return whether the last evaluation is better than all others."""
        sign = 1 if self.mode == "min" else -1
        # A job that was continued may have had other metrics before.
        *earlier, value = [
            sign * each["metrics"].get(self.metric, math.nan) for each in evaluations
        ]
        best = min((v for v in earlier if not math.isnan(v)), default=math.inf)
        return value < best


BY_NAME = {"best": BestExporter, "latest": LatestExporter, "final": FinalExporter}
