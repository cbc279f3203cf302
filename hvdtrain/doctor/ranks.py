"""A timed sum over two ranks, with each controller that Horovod has.

`check` starts this module under horovodrun. Rank 0 writes the result to a file, since
launchers mix messages of their own into the output.
"""

import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

from hvdtrain import job
from hvdtrain.doctor import installation
from hvdtrain.doctor.finding import Finding, broken, fine, run
from hvdtrain.install import compatibility
from hvdtrain.job import cores

_LIMIT_SECONDS = 180
# The gradients of MNIST's small model.
_ELEMENTS = 101_770
_ROUNDS = 50


def check() -> list[Finding]:
    """Return a finding for MPI and one for Gloo, where Horovod has them."""
    horovodrun = shutil.which("horovodrun")
    if not horovodrun or compatibility.check_keras_settings(os.environ):
        return []
    horovod, _ = installation.load_horovod()
    if not horovod:
        return []
    has_mpi = horovod["mpi"] and shutil.which("mpirun")
    controllers = ["MPI"] * bool(has_mpi) + ["Gloo"] * horovod["gloo"]
    return [_run(horovodrun, controller) for controller in controllers]


def _run(horovodrun: str, controller: str) -> Finding:
    topic = f"2 ranks, {controller}"
    program = [sys.executable, "-m", "hvdtrain.doctor.ranks"]
    command = [horovodrun, f"--{controller.lower()}", "-np", "2", *program]
    with tempfile.NamedTemporaryFile() as file:
        done = run([*command, file.name], timeout_seconds=_LIMIT_SECONDS)
        result = file.read()
    if done.code or not result:
        remedy = f"see the whole output: {' '.join(command)} /dev/stdout"
        return broken(topic, f"fail: {done.last_lines}", remedy)
    measured = json.loads(result)
    if measured["sum"] != 3.0:
        remedy = f"run {compatibility.REPLACE}"
        return broken(topic, f"1 + 2 gave {measured['sum']}", remedy)
    detail = (
        f"the sum is right, {measured['milliseconds']:.2f} ms for 0.4 MB, "
        f"threads per rank: {measured['threads_per_rank']}"
    )
    if measured["mpi_threads"] is not None:
        shared = "shared" if measured["mpi_threads"] else "alone"
        detail += f", MPI threads {shared}"
    return fine(topic, detail)


def main(path: str) -> None:
    """Reduce, and write the sum and its time to `path`."""
    world = job.start()
    # Not at the top: `start` sets the environment that Horovod reads at its import.
    import hvdtrain.keras as hvd

    ones = hvd.allreduce([1.0] * _ELEMENTS, op=hvd.Average, name="ones")
    numbers = ones * (world.rank + 1)
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        total = hvd.allreduce(numbers, op=hvd.Sum, name="two_ranks")
        times.append(time.perf_counter() - start)
    if world.is_chief:
        measured = {
            "sum": float(max(total.numpy())),
            "milliseconds": statistics.median(times) * 1000,
            "threads_per_rank": cores.usable(world.local_size),
            "mpi_threads": hvd.mpi_threads_supported() if hvd.mpi_enabled() else None,
        }
        pathlib.Path(path).write_text(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
