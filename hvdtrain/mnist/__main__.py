"""Trains a classifier of MNIST, or of data of the same form, on one rank or many.

horovodrun -np 4 python -m hvdtrain.mnist
mpirun -np 4 python -m hvdtrain.mnist --model=cnn --epochs=5
python -m hvdtrain.mnist --dataset=digits --model_dir=/tmp/digits
"""

import functools
import os

from hvdtrain import flag_fields, job, program
from hvdtrain.job import launchers, platforms
from hvdtrain.job.files import check_output
from hvdtrain.job.world import SharedJobError
from hvdtrain.mnist import options

flag_fields.define_flags(options.ClassifierOptions, options.CHECKS)


def main() -> None:
    """Train, evaluate, and write the model and the summary."""
    chosen = flag_fields.read_flags(options.ClassifierOptions)
    if chosen.timeline_file:
        _record_timeline(chosen.timeline_file)
    world = job.start(seed=chosen.seed, mesh=chosen.mesh_shape)
    # Not at the top: TensorFlow and Horovod read their environment at the import, and
    # `start` sets it.
    from hvdtrain.mnist import experiment

    experiment.train(chosen, world, report=functools.partial(print, flush=True))


def _record_timeline(path: str) -> None:
    """Make Horovod, which is not started yet, write its timeline until it ends."""
    platforms.form_job()
    launched = launchers.launch()
    if launched.size == 1:
        raise SharedJobError(
            "Received --timeline_file in a job of 1 rank, which moves nothing; "
            "expected 2 or more: start it by horovodrun -np 2 or mpirun -np 2."
        )
    if launched.rank == 0:
        check_output(path, "--timeline_file")
    os.environ["HOROVOD_TIMELINE"] = path
    # A reduction in shared memory is not in the timeline.
    os.environ.setdefault("HVDTRAIN_REDUCTION", "horovod")


if __name__ == "__main__":
    program.run(main, page=__doc__)
