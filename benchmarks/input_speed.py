"""Measures how fast files of small samples are read, beside plain tf.data.

python -m benchmarks.input_speed

docs/figures/comparisons.md describes the pipelines.
"""

import dataclasses
from typing import Any

from benchmarks import report
from hvdtrain import flag_fields, job, program
from hvdtrain.benchmark import records, tables
from hvdtrain.benchmark.benchmark_options import SECONDS_CHECK
from hvdtrain.flag_fields import flag_field, path_field
from hvdtrain.job import launchers
from hvdtrain.job.world import SharedJobError


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions:
    """The options of the program. The fields are flags: `--help` describes them."""

    batch_size: int = flag_field(1000, "Samples.", low=1, high=1 << 20)
    rounds: int = flag_field(5, "Rounds of both pipelines.", low=1, high=10_000)
    seconds: float = flag_field(1.0, "Of each pipeline in a round.", low=0, high=120)
    seed: int = flag_field(0, "Of the job.", low=0, high=2**32 - 1)
    json: str | None = path_field("File to write the figures to.")


def main() -> None:
    """Measure, print the table, and write the file."""
    options = flag_fields.read_flags(InputOptions)
    size = launchers.launch().size
    if size > 1:
        raise SharedJobError(
            f"Received a job of {size} ranks; expected one process: start python -m "
            "benchmarks.input_speed without a launcher."
        )
    records.check_json(options.json)
    world = job.start(seed=options.seed)
    # Not at the top: TensorFlow reads its environment at the import, and `start` sets
    # it.
    from benchmarks import input_pipelines
    from hvdtrain.benchmark import conditions

    result = conditions.describe(world, dataclasses.asdict(options))
    result["input"] = input_pipelines.measure(
        batch_size=options.batch_size, rounds=options.rounds, seconds=options.seconds
    )
    conditions.report(world, result, table(result), path=options.json)


def table(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    pipelines = next(iter(result["input"].values()))["samples_per_second"]
    lines = [
        *report.head(result),
        "",
        f"samples/s in batches of {result['flags']['batch_size']:,}, from files in the "
        "page cache",
        report.line(f"{'':<12}", [*pipelines, "ratio"]),
    ]
    for name, speeds in result["input"].items():
        cells = [tables.number(each) for each in speeds["samples_per_second"].values()]
        lines.append(report.line(f"{name:<12}", [*cells, f"{speeds['ratio']:.2f}"]))
    return "\n".join(lines)


if __name__ == "__main__":
    flag_fields.define_flags(InputOptions, [SECONDS_CHECK])
    program.run(main, page=__doc__)
