"""How Horovod was built, and what it lacks without hvdtrain's patches."""

from collections.abc import Mapping
from typing import Any

from hvdtrain.diagnosis.finding import Finding, broken, fine, warning
from hvdtrain.installer import misfits
from hvdtrain.installer.misfits import REPLACE, Installed

# By number of the patches: what a user loses without them. The other patches are for
# its build.
GLOO_LOSSES: Mapping[tuple[int, ...], str] = {
    (5,): "under Gloo, HOROVOD_STALL_* have no effect and a stalled job never ends",
    (24,): "under Gloo, a reducescatter makes a later large broadcast time out",
    (25,): "under Gloo, hvd.init() after hvd.shutdown() may abort",
    (21,): "elastic jobs on one host need --network-interface",
    (32,): "under Gloo, a rank that calls hvd.init() 30 s late makes the others abort",
}
LOSSES: Mapping[tuple[int, ...], str] = {
    (6, 19): "horovodrun that is stopped leaves ranks no time for a checkpoint",
    (7, 12, 14, 15, 20, 22, 23, 35): (
        "horovodrun ends failed jobs late, with tracebacks and other exit codes"
    ),
    (8, 13, 16): "horovodrun starts the ranks 2 to 5 s later",
    (17,): "Open MPI from pip waits a second at the end",
    (18,): "a rank without work takes a third of a core",
    (26,): "Horovod may need the processor on which it was built",
    (27,): "horovodrun needs ssh or rsh, also for ranks on one host",
    (30,): "SIGQUIT ends horovodrun, and no rank prints where it is",
    (31, 33, 34): "processes of other users can enter a job as its ranks",
    (36,): "horovodrun --mpi ends minutes after the network between hosts was cut",
    (37,): "horovodrun has no --no-prefix-rank-0, with which rank 0 prints no tags",
    (38,): "horovodrun --mpi prints ten lines of mpirun after the error of a rank",
}
BUILD_ONLY = (1, 2, 3, 4, 9, 10, 11, 28, 29)


def check(installed: Installed, horovod: Mapping[str, Any]) -> list[Finding]:
    """Return the findings on a Horovod that loads.

    Args:
        horovod: its properties, as `probe` prints them.
    """
    kinds = {"MPI": "mpi", "Gloo": "gloo", "NCCL": "nccl"}
    built = [name for name, key in kinds.items() if horovod[key]]
    build, directory = installed.build, installed.horovods[0]
    tensorflow = misfits.tensorflow_of(directory) or "an unknown version"
    detail = (
        f"{build.version if build else horovod['version']} in {directory}, built for "
        f"TensorFlow {tensorflow} with {', '.join(built) or 'neither MPI nor Gloo'}"
    )
    if build:
        detail += "".join(f", {text}" for text in (build.mpi, build.compiler) if text)
    if not (horovod["mpi"] or horovod["gloo"]):
        return [broken("Horovod", detail, f"run {REPLACE}")]
    return [fine("Horovod", detail), check_patches(installed, has_gloo=horovod["gloo"])]


def check_patches(installed: Installed, *, has_gloo: bool) -> Finding:
    """Return the finding on the patches that Horovod was built with."""
    numbers = {int(name.split("-")[0]) for name in installed.patches}
    losses = {**GLOO_LOSSES, **LOSSES} if has_gloo else LOSSES
    lost = [text for patches, text in losses.items() if not numbers.issuperset(patches)]
    if not lost:
        return fine("patches", "hvdtrain's")
    remedy = f"results are right without; to build it with patches, run {REPLACE}"
    detail = f"Horovod lacks patches of hvdtrain: {'; '.join(lost)}"
    return warning("patches", detail, remedy)
