"""Measures the speed of a training, and where its time goes.

python -m hvdtrain.benchmark
horovodrun -np 2 python -m hvdtrain.benchmark --workload=cnn --json=cnn.json
mpirun -np 2 python -m hvdtrain.benchmark --collectives --plot=collectives.png
mpirun -np 2 python -m hvdtrain.benchmark --workload=recommender
python -m hvdtrain.benchmark --strategy=mirrored --workload=resnet18

The default takes about a minute. docs/benchmark.md describes the figures.
"""

import math

from absl import flags

from hvdtrain import data, job, optimizers, program
from hvdtrain.collectives import environment
from hvdtrain.job import launchers
from hvdtrain.measurement import comparison, mpi, records
from hvdtrain.measurement.benchmark_options import (
    STRATEGIES,
    WORKLOADS,
    Options,
    is_workload,
)

# Each is a field of `measurement.options.Options`.
flags.DEFINE_string(
    "workload",
    "mlp",
    f"What is trained: {', '.join(WORKLOADS)}, or module:function, where the function "
    "returns a compiled Keras model. backward: 25 million parameters, with a backward "
    "pass of --backward_ms that leaves the CPU free. recommender, wide: several kinds "
    "of parallelism, beside each other.",
)
flags.DEFINE_enum(
    "strategy",
    "horovod",
    STRATEGIES,
    "horovod: one process per device. mirrored: one process, several devices, "
    "TensorFlow's MirroredStrategy. split: one process, several devices, with the "
    "weights on the first. single: one process and device.",
)
flags.DEFINE_integer(
    "devices", 2, "Devices of mirrored and split.", lower_bound=2, upper_bound=64
)
flags.DEFINE_bool(
    "collectives", False, "Measure allreduce by itself, instead of a training."
)
flags.DEFINE_integer(
    "max_bytes",
    256_000_000,
    "Largest message of --collectives.",
    lower_bound=4000,
    upper_bound=4_000_000_000,
)
flags.DEFINE_integer("rounds", 0, "Rounds of all variants, 0 for a default.", 0, 10_000)
flags.DEFINE_float("seconds", 0, "Of each variant in a round, 0 for a default.", 0, 120)
flags.DEFINE_integer(
    "batch_size", 0, "Samples per rank and step, 0 for a default.", 0, 1 << 20
)
flags.DEFINE_integer(
    "steps_per_execution",
    0,
    "Steps per call of the compiled train function, 0 for a default.",
    0,
    1_000_000,
)
flags.DEFINE_enum("dataset", "auto", data.NAMES, "Of mlp, mlp512 and cnn.")
flags.DEFINE(program.Path(), "data_dir", None, "Directory of the data set.")
flags.DEFINE_float(
    "backward_ms", 326, "Backward pass of --workload=backward.", 0, 60_000
)
flags.DEFINE_list(
    "tables",
    ["1000", "3000", "10000", "30000", "100000", "200000", "300000", "1000000"],
    "Rows of each embedding table of --workload=recommender.",
)
flags.DEFINE_integer("columns", 32, "Columns of these tables.", 1, 1 << 16)
flags.DEFINE_list(
    "units", ["256", "128"], "Of the dense layers on top of them; may be empty."
)
flags.DEFINE_enum(
    "optimizer", "sgd", list(optimizers.LEARNING_RATES), "Of recommender and wide."
)
flags.DEFINE_integer("seed", 0, "Of weights and order.", 0, 2**32 - 1)
flags.DEFINE_integer(
    "consistency_steps",
    5,
    "Steps that are compared with one process and the whole batch, 0 for none.",
    0,
    1000,
)
flags.DEFINE_list(
    "compare", None, "Print a table of these files of --json, and measure nothing."
)
flags.DEFINE(program.Path(), "json", None, "File to write the figures to.")
flags.DEFINE(program.Path(), "plot", None, "PNG file to draw the figures in.")


@flags.validator("workload", f"expected {', '.join(WORKLOADS)}, or module:function")
def _check_workload(text):
    return is_workload(text)


@flags.multi_flags_validator(
    ["seconds", "backward_ms"], "expected numbers for --seconds and --backward_ms"
)
def _check_numbers(values):
    # absl's bounds accept nan.
    return not any(map(math.isnan, values.values()))


@flags.validator("compare", "expected files that --json wrote, such as a.json,b.json")
def _check_compare(paths):
    return paths is None or bool(paths and all(paths))


@flags.validator("units", "expected numbers of units, such as 256,128, or none")
def _check_units(sizes):
    return all(size.isdigit() and int(size) for size in sizes)


@flags.validator("tables", "expected numbers of rows, such as 1000,1000000")
def _check_tables(sizes):
    return bool(sizes) and all(size.isdigit() and int(size) for size in sizes)


def main():
    """Measure, print the figures, and write them to files."""
    # Before `start` imports TensorFlow, which defines flags of its own.
    values = program.flag_values()
    if paths := values.pop("compare"):
        print(comparison.table(records.read_json(paths)), flush=True)
        return
    options = Options(**values).with_defaults()
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
    world = job.start(seed=values["seed"], mesh=options.mesh_shape(launched.size))
    # Not at the top: TensorFlow and Horovod read their environment at the import, and
    # `start` sets it.
    from hvdtrain.measurement import running

    result, table = running.run(options, world, mpi_seconds=mpi_seconds)
    if world.is_chief:
        print(table, flush=True)
    running.write(options, world, result)


if __name__ == "__main__":
    program.run(main, page=__doc__)
