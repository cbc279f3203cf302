"""Two ranks that add up numbers, timed: the proof, by each controller there is.

The check starts this module under horovodrun. Rank 0 writes to the file that it is
told what came out, since launchers put words of their own between those of ranks.
"""

import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

from hvdtrain import job
from hvdtrain.diagnosis import installation
from hvdtrain.diagnosis.finding import ask, broken, fine
from hvdtrain.job import cores

_LIMIT_SECONDS = 180
# The gradients of MNIST's small model.
_ELEMENTS = 101_770
_ROUNDS = 50


def check():
    """Return a finding for MPI and one for Gloo, where Horovod has them."""
    horovodrun = shutil.which("horovodrun")
    if not horovodrun:
        return []
    horovod, _ = installation.load("Horovod", "horovod")
    if not horovod:
        return []
    has_mpi = horovod["mpi"] and shutil.which("mpirun")
    controllers = ["MPI"] * bool(has_mpi) + ["Gloo"] * horovod["gloo"]
    return [_run(horovodrun, controller) for controller in controllers]


def _run(horovodrun, controller):
    topic = f"2 ranks, {controller}"
    program = [sys.executable, "-m", "hvdtrain.diagnosis.ranks"]
    command = [horovodrun, f"--{controller.lower()}", "-np", "2", *program]
    with tempfile.NamedTemporaryFile() as file:
        answer = ask([*command, file.name], timeout_seconds=_LIMIT_SECONDS)
        result = file.read()
    if answer.code or not result:
        # Launchers end with words on themselves: the cause comes first.
        remedy = f"see all it says: {' '.join(command)} /dev/stdout"
        return broken(topic, f"fail: {answer.last_words}", remedy)
    said = json.loads(result)
    if said["sum"] != 3.0:
        remedy = "build Horovod again: scripts/setup.sh"
        return broken(topic, f"1 + 2 gave {said['sum']}", remedy)
    detail = (
        f"the sum is right, {said['milliseconds']:.2f} ms for 0.4 MB, "
        f"{said['threads_per_rank']} threads per rank"
    )
    if said["mpi_threads"] is not None:
        detail += f", MPI threads {'shared' if said['mpi_threads'] else 'alone'}"
    return fine(topic, detail)


def main(path):
    """Reduce, and write to `path` what came out and how long it took."""
    world = job.start()
    import tensorflow as tf

    import hvdtrain.keras as hvd

    numbers = tf.fill([_ELEMENTS], float(world.rank + 1))
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        total = hvd.allreduce(numbers, op=hvd.Sum, name="two_ranks")
        times.append(time.perf_counter() - start)
    if world.is_chief:
        said = {
            "sum": float(tf.reduce_max(total)),
            "milliseconds": statistics.median(times) * 1000,
            "threads_per_rank": cores.usable(world.local_size),
            "mpi_threads": hvd.mpi_threads_supported() if hvd.mpi_enabled() else None,
        }
        pathlib.Path(path).write_text(json.dumps(said) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
