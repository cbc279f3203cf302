"""Measures the speed of a training, and where its time goes.

python -m hvdtrain.benchmark
horovodrun -np 2 python -m hvdtrain.benchmark --workload=cnn --json=cnn.json
mpirun -np 2 python -m hvdtrain.benchmark --collectives --plot=collectives.png
mpirun -np 2 python -m hvdtrain.benchmark --workload=recommender
python -m hvdtrain.benchmark --input
python -m hvdtrain.benchmark --strategy=mirrored --workload=resnet18

The default takes about a minute. docs/figures/benchmark.md describes the figures.
"""

from absl import flags

from hvdtrain import environment, flag_fields, job, program
from hvdtrain.job import launchers
from hvdtrain.measurement import benchmark_options, mpi, records, tables
from hvdtrain.measurement.benchmark_options import BenchmarkOptions

flag_fields.define_flags(BenchmarkOptions, benchmark_options.CHECKS)
_COMPARE = flags.DEFINE_list(
    "compare", None, "Print a table of these files of --json, and measure nothing."
)


@flags.validator("compare", "expected files that --json wrote, such as a.json,b.json")
def _check_compare(paths: list[str] | None) -> bool:
    return paths is None or bool(paths and all(paths))


def main() -> None:
    """Measure, print the figures, and write them to files."""
    if _COMPARE.value:
        print(tables.comparison(records.read_json(_COMPARE.value)), flush=True)
        return
    options = flag_fields.read_flags(BenchmarkOptions).with_defaults()
    launched = launchers.launch()
    options.check(launched.size)
    if launched.rank == 0:
        records.check(options)
    environment.set_default_stall_limits(environment.BENCHMARK_LIMITS)
    mpi_seconds = {}
    if options.collectives:
        mpi_seconds = mpi.measure(
            options.message_sizes, rounds=options.rounds, seconds=options.seconds
        )
    world = job.start(seed=options.seed, mesh=options.mesh_shape(launched.size))
    # Not at the top: TensorFlow and Horovod read their environment at the import, and
    # `start` sets it.
    from hvdtrain.measurement import running

    result, table = running.run(options, world, mpi_seconds=mpi_seconds)
    if world.is_chief:
        print(table, flush=True)
    running.write(options, world, result)


if __name__ == "__main__":
    program.run(main, page=__doc__)
