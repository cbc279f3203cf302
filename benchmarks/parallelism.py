"""Measures memory, bytes and time of a step in several kinds of parallelism.

mpirun -np 2 python -m benchmarks.parallelism
mpirun -np 2 python -m benchmarks.parallelism --workload=wide --optimizer=adam

docs/figures/comparisons.md describes the kinds and the figures.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from hvdtrain import environment, flag_fields, job, program
from hvdtrain.benchmark import records, tables
from hvdtrain.benchmark.benchmark_options import SECONDS_CHECK
from hvdtrain.flag_fields import FlagCheck, flag_field, path_field
from hvdtrain.job import launchers
from hvdtrain.job.world import MeshShape, SharedJobError
from hvdtrain.optimizers import LEARNING_RATES

# By workload: samples per rank and step, rounds, seconds of a kind in a round.
_DEFAULTS = {"recommender": (512, 7, 1.5), "wide": (64, 5, 3.0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelismOptions:
    """The options of the program. The fields are flags: `--help` describes them."""

    workload: str = flag_field(
        "recommender", "What is trained.", choices=tuple(_DEFAULTS)
    )
    rounds: int = flag_field(
        0, "Rounds of all kinds, 0 for a default.", low=0, high=10_000
    )
    seconds: float = flag_field(
        0.0, "Of each kind in a round, 0 for a default.", low=0, high=120
    )
    batch_size: int = flag_field(
        0, "Samples per rank and step, 0 for a default.", low=0, high=1 << 20
    )
    steps_per_execution: int = flag_field(
        1, "Steps per call of the compiled train function.", low=1, high=1_000_000
    )
    tables: Sequence[str] = flag_field(
        ("1000", "3000", "10000", "30000", "100000", "200000", "300000", "1000000"),
        "Rows of each embedding table of --workload=recommender.",
    )
    columns: int = flag_field(32, "Columns of these tables.", low=1, high=1 << 16)
    units: Sequence[str] = flag_field(
        ("256", "128"), "Of the dense layers on top of them; may be empty."
    )
    optimizer: str = flag_field("sgd", "Of the model.", choices=LEARNING_RATES)
    seed: int = flag_field(0, "Of weights and samples.", low=0, high=2**32 - 1)
    json: str | None = path_field("File to write the figures to.")

    def with_defaults(self) -> "ParallelismOptions":
        """Return the options with the workload's defaults in place of zeros."""
        batch_size, rounds, seconds = _DEFAULTS[self.workload]
        return dataclasses.replace(
            self,
            batch_size=self.batch_size or batch_size,
            rounds=self.rounds or rounds,
            seconds=self.seconds or seconds,
        )

    @property
    def table_rows(self) -> list[int]:
        """The rows of each embedding table."""
        return [int(rows) for rows in self.tables]


def _are_numbers(texts: Sequence[str]) -> bool:
    return all(text.isdigit() and int(text) for text in texts)


CHECKS = (
    SECONDS_CHECK,
    FlagCheck(
        lambda units: _are_numbers(units),
        "expected numbers of units, such as 256,128, or none",
    ),
    FlagCheck(
        lambda tables: bool(tables) and _are_numbers(tables),
        "expected numbers of rows, such as 1000,1000000",
    ),
)


def main() -> None:
    """Measure, print the table, and write the file."""
    options = flag_fields.read_flags(ParallelismOptions).with_defaults()
    size = launchers.launch().size
    if size == 1:
        raise SharedJobError(
            "Received a job of 1 rank; expected 2 or more, over which the model is "
            "sharded: start it by horovodrun -np 2 or mpirun -np 2."
        )
    records.check_json(options.json)
    environment.set_default_stall_limits(environment.BENCHMARK_LIMITS)
    # The process sets of the stages are made at the start.
    mesh = MeshShape(pipeline=size) if options.workload == "wide" else None
    world = job.start(seed=options.seed, mesh=mesh)
    # Not at the top: TensorFlow and Horovod read their environment at the import, and
    # `start` sets it.
    from benchmarks import kinds
    from hvdtrain.benchmark import conditions

    result = conditions.describe(world, dataclasses.asdict(options))
    result["parallelism"] = kinds.measure(options, world)
    conditions.report(world, result, table(result), path=options.json)


def table(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    flags = result["flags"]
    workload = flags["workload"]
    if workload == "recommender":
        rows = ", ".join(f"{int(rows):,}" for rows in flags["tables"])
        workload += f"; tables of {flags['columns']} columns and {rows} rows"
        workload += f"; {', '.join([*flags['units'], '1'])} units"
    heads = ("weights and slots", "sent in a step", "step", "loss")
    lines = [
        *report.head(
            result,
            ("workload", f"{workload}; {flags['optimizer']}"),
            ("batch", f"{tables.batch_text(flags)} per kind"),
        ),
        "",
        "the most of a rank, and how many times replicated",
        report.line(f"{'':<12}", heads),
    ]
    for name, figures in result["parallelism"].items():
        lines.append(report.line(f"{name:<12}", _cells(figures)))
    return "\n".join(lines)


def _cells(figures: tables.Figures) -> list[str]:
    ratios = figures["against_replicated"]
    texts = {
        "memory": tables.size_text(largest_memory(figures)),
        "sent_bytes": tables.size_text(max(figures["sent_bytes_by_rank"])),
        "step_seconds": tables.milliseconds(figures["step_seconds"]),
    }
    cells = [f"{text} {ratios[name]:7.3f}" for name, text in texts.items()]
    return [*cells, f"{figures['loss']:.6f}"]


def largest_memory(figures: tables.Figures) -> int:
    """Return the bytes of weights and slots of the rank with most of them."""
    weights, slots = figures["weight_bytes_by_rank"], figures["slot_bytes_by_rank"]
    return max(map(sum, zip(weights, slots, strict=True)))


if __name__ == "__main__":
    flag_fields.define_flags(ParallelismOptions, CHECKS)
    program.run(main, page=__doc__)
