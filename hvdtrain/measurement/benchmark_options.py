"""The options of a benchmark, and their defaults by workload: its flags.

Importing this module loads no TensorFlow.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from hvdtrain import data
from hvdtrain.flag_fields import FlagCheck, flag_field, path_field
from hvdtrain.job.world import MeshShape, SharedJobError
from hvdtrain.optimizers import LEARNING_RATES

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
    "backward": Defaults(batch_size=1, steps_per_execution=1, rounds=5, seconds=3.0),
    "recommender": Defaults(batch_size=512, steps_per_execution=1, seconds=1.5),
    "wide": Defaults(batch_size=64, steps_per_execution=1, rounds=5, seconds=3.0),
}
# The benchmark trains these in several kinds of parallelism.
_PARALLEL_WORKLOADS = ("recommender", "wide")
_FUNCTION_DEFAULTS = Defaults(
    batch_size=32, steps_per_execution=1, rounds=5, seconds=2.0
)
# Batches are not used. Each round measures four paths at ten sizes.
_COLLECTIVES_DEFAULTS = Defaults(
    batch_size=1, steps_per_execution=1, rounds=7, seconds=0.1
)
_INPUT_DEFAULTS = Defaults(batch_size=1000, steps_per_execution=1, rounds=5)
_FIRST_BYTES, _FACTOR = 1000, 4
STRATEGIES = ("horovod", "mirrored", "split", "single")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """The options of a benchmark. The fields are flags: `--help` describes them."""

    workload: str = flag_field(
        "mlp",
        f"What is trained: {', '.join(WORKLOADS)}, or module:function, where the "
        "function returns a compiled Keras model. backward: 25 million parameters, "
        "with a backward pass of --backward_ms that leaves the CPU free. recommender, "
        "wide: several kinds of parallelism, beside each other.",
    )
    strategy: str = flag_field(
        "horovod",
        "horovod: one process per device. mirrored: one process, several devices, "
        "TensorFlow's MirroredStrategy. split: one process, several devices, with the "
        "weights on the first. single: one process and device.",
        choices=STRATEGIES,
    )
    devices: int = flag_field(2, "Devices of mirrored and split.", low=2, high=64)
    collectives: bool = flag_field(
        False, "Measure allreduce by itself, instead of a training."
    )
    input: bool = flag_field(
        False,
        "Measure how fast files of small samples are read, instead of a training.",
    )
    max_bytes: int = flag_field(
        256_000_000, "Largest message of --collectives.", low=4000, high=4_000_000_000
    )
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
    dataset: str = flag_field("auto", "Of mlp, mlp512 and cnn.", choices=data.NAMES)
    data_dir: str | None = path_field("Directory of the data set.")
    backward_ms: float = flag_field(
        326.0, "Backward pass of --workload=backward.", low=0, high=60_000
    )
    tables: Sequence[str] = flag_field(
        ("1000", "3000", "10000", "30000", "100000", "200000", "300000", "1000000"),
        "Rows of each embedding table of --workload=recommender.",
    )
    columns: int = flag_field(32, "Columns of these tables.", low=1, high=1 << 16)
    units: Sequence[str] = flag_field(
        ("256", "128"), "Of the dense layers on top of them; may be empty."
    )
    optimizer: str = flag_field(
        "sgd", "Of recommender and wide.", choices=LEARNING_RATES
    )
    seed: int = flag_field(0, "Of weights and order.", low=0, high=2**32 - 1)
    consistency_steps: int = flag_field(
        5,
        "Steps that are compared with one process and the global batch, 0 for none.",
        low=0,
        high=1000,
    )
    json: str | None = path_field("File to write the figures to.")
    plot: str | None = path_field("PNG file to draw the figures in.")

    def with_defaults(self) -> "BenchmarkOptions":
        """Return the options with the workload's defaults in place of zeros."""
        defaults = WORKLOADS.get(self.workload, _FUNCTION_DEFAULTS)
        if self.collectives:
            defaults = _COLLECTIVES_DEFAULTS
        if self.input:
            defaults = _INPUT_DEFAULTS
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
        if self.collectives and size == 1:
            raise SharedJobError(
                "Received --collectives in a job of 1 rank; expected 2 or more: start "
                "it by horovodrun -np 2 or mpirun -np 2."
            )
        if self.input and size > 1:
            raise SharedJobError(
                f"Received --input in a job of {size} ranks; expected one process: "
                "start python -m hvdtrain.benchmark without a launcher."
            )
        if self.compares_parallelism and size == 1:
            raise SharedJobError(
                f"Received --workload={self.workload} in a job of 1 rank; expected 2 "
                "or more, over which it is sharded: start it by horovodrun -np 2 or "
                "mpirun -np 2."
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

    @property
    def compares_parallelism(self) -> bool:
        """Whether kinds of parallelism are compared, not the times within a step."""
        measures_less = self.collectives or self.input
        return self.workload in _PARALLEL_WORKLOADS and not measures_less

    def mesh_shape(self, size: int) -> MeshShape | None:
        """Return the mesh, of `size` ranks, whose process sets `job.start` makes."""
        needs_stages = self.compares_parallelism and self.workload == "wide"
        return MeshShape(pipeline=size) if needs_stages else None

    @property
    def table_rows(self) -> list[int]:
        """The rows of each embedding table."""
        return [int(rows) for rows in self.tables]

    @property
    def message_sizes(self) -> list[int]:
        """The bytes of the messages of --collectives: 1 kB, 4 kB, ..., and the largest.

        Multiples of 4, the bytes of a float32.
        """
        sizes, last = [_FIRST_BYTES], self.max_bytes // 4 * 4
        while sizes[-1] * _FACTOR < last:
            sizes.append(sizes[-1] * _FACTOR)
        return [*sizes, last]


def is_workload(workload: str) -> bool:
    """Whether the text names a workload, or is of the form `module:function`."""
    return workload in WORKLOADS or bool(_FUNCTION.fullmatch(workload))


def _are_numbers(texts: Sequence[str]) -> bool:
    return all(text.isdigit() and int(text) for text in texts)


CHECKS = (
    FlagCheck(
        lambda input, collectives, plot: not (input and (collectives or plot)),
        "expected --input without --collectives and --plot",
    ),
    FlagCheck(
        is_workload,
        f"expected {', '.join(WORKLOADS)}, or module:function",
    ),
    # absl's bounds accept nan.
    FlagCheck(
        lambda seconds, backward_ms: not math.isnan(seconds + backward_ms),
        "expected numbers for --seconds and --backward_ms",
    ),
    FlagCheck(
        lambda units: _are_numbers(units),
        "expected numbers of units, such as 256,128, or none",
    ),
    FlagCheck(
        lambda tables: bool(tables) and _are_numbers(tables),
        "expected numbers of rows, such as 1000,1000000",
    ),
)
