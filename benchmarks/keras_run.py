"""Trains a workload of `benchmarks.loads` with hvdtrain, and prints its figures.

mpirun -np 2 python -m benchmarks.keras_run --load=dlrm --kind=row

`benchmarks.beside_torch` starts it; docs/figures/comparisons.md describes the figures.
"""

from benchmarks import load_options
from benchmarks.load_options import KERAS_KINDS, TrainingOptions
from hvdtrain import environment, flag_fields, job, program
from hvdtrain.benchmark import records


def main() -> None:
    """Train, print a line, and write the file."""
    options = flag_fields.read_flags(TrainingOptions).of(KERAS_KINDS)
    records.check_json(options.json)
    environment.set_default_stall_limits(environment.BENCHMARK_LIMITS)
    world = job.start()
    # Not at the top: TensorFlow and Horovod read their environment at the import, and
    # `start` sets it.
    from benchmarks import keras_training

    figures = keras_training.measure(options, world)
    if world.is_chief:
        load_options.report(options, figures)


if __name__ == "__main__":
    flag_fields.define_flags(TrainingOptions, load_options.CHECKS)
    program.run(main, page=__doc__)
