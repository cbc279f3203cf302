"""Measures the speed of a training, and where its time goes.

python -m hvdtrain.benchmark
horovodrun -np 2 python -m hvdtrain.benchmark --workload=cnn --json=cnn.json
mpirun -np 2 python -m hvdtrain.benchmark --workload=my_model:make
python -m hvdtrain.benchmark --strategy=mirrored --workload=resnet18

The default takes two to three minutes on two cores. docs/figures/benchmark.md describes
the figures.
"""

import dataclasses

from absl import flags

from hvdtrain import environment, flag_fields, job, program
from hvdtrain.benchmark import benchmark_options, records, tables
from hvdtrain.benchmark.benchmark_options import BenchmarkOptions
from hvdtrain.job import launchers, platforms

flag_fields.define_flags(BenchmarkOptions, benchmark_options.CHECKS)
_COMPARE = flags.DEFINE_list(
    "compare", None, "Print a table of these files of --json, and measure nothing."
)


@flags.validator("compare", "expected files that --json wrote, such as a.json,b.json")
def _check_compare(paths: list[str] | None) -> bool:
    return paths is None or bool(paths and all(paths))


def main() -> None:
    """Measure, print the figures, and write them to a file."""
    if _COMPARE.value:
        print(tables.comparison(records.read_json(_COMPARE.value)), flush=True)
        return
    chosen = flag_fields.read_flags(BenchmarkOptions).with_defaults()
    platforms.form_job()
    chosen.check(launchers.launch().size)
    records.check_json(chosen.json)
    environment.set_default_stall_limits(environment.BENCHMARK_LIMITS)
    world = job.start(seed=chosen.seed)
    # Not at the top: TensorFlow and Horovod read their environment at the import, and
    # `start` sets it.
    from hvdtrain.benchmark import conditions, throughput

    values = dataclasses.asdict(chosen)
    result = conditions.describe(world, values, strategy=chosen.strategy)
    result["figures"] = throughput.measure(chosen, world)
    conditions.report(world, result, tables.training(result), path=chosen.json)


if __name__ == "__main__":
    program.run(main, page=__doc__)
