"""The options of a benchmark, and their defaults by workload: its flags.

Importing this module loads no TensorFlow.
"""

import dataclasses
import math
import re

from hvdtrain import data
from hvdtrain.flag_fields import FlagCheck, flag_field, path_field
from hvdtrain.job.world import SharedJobError

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
    """The options of a workload where the flags are 0.

    Attributes:
        batch_size: samples per rank and step.
        steps_per_execution: steps per call of the compiled train function.
        rounds: rounds of all variants.
        seconds: time of each variant in each round.
    """

    batch_size: int
    steps_per_execution: int
    rounds: int = 7
    seconds: float = 1.0


# mlp, mlp512 and cnn take the batches of the table in the README and the steps per
# execution that `hvdtrain.mnist` has with these batches.
WORKLOADS = {
    "mlp": Defaults(batch_size=64, steps_per_execution=20),
    "mlp512": Defaults(batch_size=64, steps_per_execution=20),
    "cnn": Defaults(batch_size=128, steps_per_execution=20, rounds=3, seconds=6.0),
    "small_cnn": Defaults(batch_size=64, steps_per_execution=10, rounds=5, seconds=2.0),
    "resnet18": Defaults(batch_size=16, steps_per_execution=1, rounds=3, seconds=18.0),
}
_FUNCTION_DEFAULTS = Defaults(
    batch_size=32, steps_per_execution=1, rounds=5, seconds=2.0
)
STRATEGIES = ("horovod", "mirrored", "split", "single")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """The options of a benchmark. The fields are flags: `--help` describes them."""

    workload: str = flag_field(
        "mlp",
        f"What is trained: {', '.join(WORKLOADS)}, or module:function, where the "
        "function returns a compiled Keras model, or it and a function of samples.",
    )
    strategy: str = flag_field(
        "horovod",
        "horovod: one process per device. mirrored: one process, several devices, "
        "TensorFlow's MirroredStrategy. split: one process, several devices, with the "
        "weights on the first. single: one process and device.",
        choices=STRATEGIES,
    )
    devices: int = flag_field(2, "Devices of mirrored and split.", low=2, high=64)
    rounds: int = flag_field(
        0, "Rounds of all variants, 0 for a default.", low=0, high=10_000
    )
    seconds: float = flag_field(
        0.0, "Of each variant in a round, 0 for a default.", low=0, high=120
    )
    batch_size: int = flag_field(
        0, "Samples per rank and step, 0 for a default.", low=0, high=1 << 20
    )
    steps_per_execution: int = flag_field(
        0,
        "Steps per call of the compiled train function, 0 for a default.",
        low=0,
        high=1_000_000,
    )
    jit_compile: bool = flag_field(
        False, "XLA compiles all variants, but not the reduction of gradients."
    )
    dataset: str = flag_field("auto", "Of mlp, mlp512 and cnn.", choices=data.NAMES)
    data_dir: str | None = path_field("Directory of the data set.")
    seed: int = flag_field(0, "Of weights and order.", low=0, high=2**32 - 1)
    json: str | None = path_field("File to write the figures to.")

    def with_defaults(self) -> "BenchmarkOptions":
        """Return the options with the workload's defaults in place of zeros."""
        defaults = WORKLOADS.get(self.workload, _FUNCTION_DEFAULTS)
        if self.strategy == "mirrored":
            # Keras' `fit` fails with more than one under this strategy.
            defaults = dataclasses.replace(defaults, steps_per_execution=1)
        chosen = {
            name: getattr(self, name) or value
            for name, value in dataclasses.asdict(defaults).items()
        }
        return dataclasses.replace(self, **chosen)

    def check(self, size: int) -> None:
        """Raise `SharedJobError` unless a job of `size` ranks can measure this."""
        if self.jit_compile and self.workload not in WORKLOADS:
            raise SharedJobError(
                f"Received --jit_compile with --workload={self.workload}; expected one "
                f"of {', '.join(WORKLOADS)}. A function passes jit_compile=True to "
                "model.compile() itself."
            )
        if self.strategy != "horovod" and size > 1:
            raise SharedJobError(
                f"Received {size} ranks with --strategy={self.strategy}; expected one "
                "process: start python -m hvdtrain.benchmark without a launcher."
            )
        if self.strategy == "mirrored" and self.steps_per_execution > 1:
            raise SharedJobError(
                f"Received --steps_per_execution={self.steps_per_execution} with "
                "--strategy=mirrored; expected 1, as Keras' fit fails with more under "
                "MirroredStrategy."
            )


def is_workload(workload: str) -> bool:
    """Whether the text names a workload, or is of the form `module:function`."""
    return workload in WORKLOADS or bool(_FUNCTION.fullmatch(workload))


# absl's bounds accept nan.
SECONDS_CHECK = FlagCheck(
    lambda seconds: not math.isnan(seconds), "expected a number for --seconds"
)
CHECKS = (
    FlagCheck(
        is_workload,
        f"expected {', '.join(WORKLOADS)}, or module:function",
    ),
    SECONDS_CHECK,
)
