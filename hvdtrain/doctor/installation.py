"""Versions, the libraries that Horovod was built with, and the launchers."""

import functools
import json
import os
import pathlib
import platform
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from hvdtrain.doctor import gpus
from hvdtrain.doctor.finding import (
    CommandResult,
    Finding,
    broken,
    fine,
    run,
    warning,
)
from hvdtrain.install import compatibility, record
from hvdtrain.install.compatibility import REPLACE, Installed, Mismatch

# Properties of a library by name, as `probe` prints them.
Properties = Mapping[str, Any]

_LOAD_SECONDS = 120
# Without them, Open MPI's mpirun does not start as root.
_AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")

# By number of the patches: what a user loses without them. The other patches are for
# its build.
GLOO_LOSSES: Mapping[tuple[int, ...], str] = {
    (5,): "under Gloo, HOROVOD_STALL_* have no effect and a stalled job never ends",
    (24,): "under Gloo, a reducescatter makes a later large broadcast time out",
    (25,): "under Gloo, hvd.init() after hvd.shutdown() may abort",
    (21,): "an elastic job on one host, and one by its own name, may not start",
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
    (39,): "a signal in the first second of horovodrun is lost, or ends in a traceback",
    (40,): "horovodrun --gloo starts ranks with the variables of a job around it",
    (41,): "horovodrun does not start where HOME or /dev/shm is read-only",
}
BUILD_ONLY = (1, 2, 3, 4, 9, 10, 11, 28, 29)


def check() -> list[Finding]:
    """Return the findings on the installed libraries and programs."""
    installed = compatibility.read_installed()
    findings = [
        fine("Python", f"{platform.python_version()}, {sys.executable}"),
        *_broken(compatibility.check_keras_settings(os.environ)),
    ]
    tensorflow, failures = load_tensorflow()
    findings += failures
    if tensorflow:
        findings += _check_tensorflow(tensorflow, installed)
        findings.append(_check_native(tensorflow))
    horovod, failures = load_horovod()
    findings += failures
    if horovod:
        findings += check_horovod(installed, horovod)
    findings += _check_doubts(tensorflow, installed)
    if installed.horovods:
        findings += _check_launchers(horovod)
    if horovod and horovod["mpi"]:
        findings += _check_mpi4py(horovod)
    return [*findings, *gpus.check(tensorflow, horovod)]


def _broken(mismatch: Mismatch | None) -> list[Finding]:
    return (
        [broken(mismatch.topic, mismatch.detail, mismatch.remedy)] if mismatch else []
    )


@functools.cache
def load_tensorflow() -> tuple[Properties | None, list[Finding]]:
    """Return the properties of TensorFlow; None and a finding where it fails."""
    if mismatch := compatibility.check_tensorflow_installed(
        compatibility.read_installed()
    ):
        return None, _broken(mismatch)
    tensorflow, done = _probe("tensorflow")
    if not tensorflow:
        remedy = "reinstall it: pip install --force-reinstall 'hvdtrain[cpu]'"
        return None, [broken("TensorFlow", _describe_failure(done), remedy)]
    return tensorflow, []


@functools.cache
def load_horovod() -> tuple[Properties | None, list[Finding]]:
    """Return the properties of Horovod; None and a finding where it does not fit.

    Without a TensorFlow, to which the findings belong then, there is neither.
    """
    installed = compatibility.read_installed()
    mismatch = compatibility.check_horovod_installed(installed)
    tensorflow, _ = load_tensorflow()
    if not mismatch and not tensorflow:
        return None, []
    if not mismatch and tensorflow:
        mismatch = compatibility.check_horovod(installed, tensorflow["version"])
    if mismatch:
        return None, _broken(mismatch)
    horovod, done = _probe("horovod")
    if horovod:
        return horovod, []
    if mismatch := compatibility.explain(ImportError(done.errors), installed):
        return None, _broken(mismatch)
    detail = f"{installed.horovod} {_describe_failure(done)}"
    return None, [broken("Horovod", detail, f"run {REPLACE}")]


def _probe(library: str) -> tuple[Properties | None, CommandResult]:
    """Return the properties that `probe` prints of a library, and its process."""
    command = [sys.executable, "-m", "hvdtrain.doctor.probe", library]
    done = run(command, timeout_seconds=_LOAD_SECONDS)
    if done.code:
        return None, done
    # The last line: libraries may print others at their import.
    return json.loads(done.output.splitlines()[-1]), done


def _describe_failure(done: CommandResult) -> str:
    if done.code < 0:
        return f"ended Python by signal {-done.code} when it was imported"
    return f"cannot be loaded: {done.last_lines}"


def _check_tensorflow(tensorflow: Properties, installed: Installed) -> list[Finding]:
    found = [
        *_broken(compatibility.check_tensorflow(tensorflow["version"], installed)),
        *_broken(compatibility.check_keras(tensorflow["keras"])),
    ]
    if not found:
        detail = f"{tensorflow['version']}, Keras {tensorflow['keras']}"
        found.append(fine("TensorFlow", detail))
    packages = installed.tensorflow_packages
    if len(packages) > 1:
        listed = " and ".join(f"{name} {version}" for name, version in packages.items())
        remedy = f"pip uninstall {' '.join(packages)}, then pip install one of them"
        detail = f"{listed} are installed, with the same files"
        found.append(warning("two TensorFlows", detail, remedy))
    return found


def _check_doubts(tensorflow: Properties | None, installed: Installed) -> list[Finding]:
    if not tensorflow:
        return []
    versions = {"tensorflow": tensorflow["version"], "keras": tensorflow["keras"]}
    return [
        warning(doubt.topic, doubt.detail, doubt.remedy)
        for doubt in compatibility.doubts(installed, **versions)
    ]


def _check_native(tensorflow: Properties) -> Finding:
    obstacle = tensorflow["without_native"]
    if obstacle:
        return warning("operations", obstacle, "training works without, but slower")
    return fine("operations", "hvdtrain's own are built")


def _check_launchers(horovod: Properties | None) -> list[Finding]:
    horovodrun, mpirun = shutil.which("horovodrun"), shutil.which("mpirun")
    own = pathlib.Path(sys.executable).parent
    remedy = f"put it on the PATH: PATH={own}:$PATH"
    findings = []
    if not horovodrun:
        if not (own / "horovodrun").exists():
            remedy = f"run {REPLACE}"
        findings.append(broken("horovodrun", "is not on the PATH", remedy))
    elif pathlib.Path(horovodrun).parent != own and (own / "horovodrun").exists():
        detail = f"{horovodrun} belongs to another Python than {sys.executable}"
        findings.append(warning("horovodrun", detail, remedy))
    else:
        controller = _describe_controller(horovod, mpirun) if horovod else ""
        detail = f"{horovodrun}, {controller}" if controller else horovodrun
        findings.append(fine("horovodrun", detail))
    if mpirun:
        findings.append(_check_mpirun(mpirun))
    elif horovod and horovod["mpi"]:
        remedy = "only Gloo can be used; put the MPI's bin directory on the PATH"
        findings.append(warning("mpirun", "is not on the PATH", remedy))
    return findings


def _describe_controller(horovod: Properties, mpirun: str | None) -> str:
    chosen = os.environ.get("HOROVOD_CONTROLLER")
    if chosen:
        return f"takes {chosen}, from HOROVOD_CONTROLLER"
    if horovod["mpi"] and mpirun:
        return "takes MPI without --gloo"
    return "takes Gloo"


def _check_mpirun(mpirun: str) -> Finding:
    done = run([mpirun, "--version"], timeout_seconds=20)
    if done.code:
        remedy = "repair the MPI, or launch by horovodrun --gloo"
        return broken("mpirun", f"{mpirun} fails: {done.last_lines}", remedy)
    detail = f"{mpirun}, {done.output.strip().partition(chr(10))[0]}"
    missing = [name for name in _AS_ROOT if name not in os.environ]
    if os.geteuid() == 0 and "Open" in done.output and missing:
        remedy = f"export {' '.join(f'{name}=1' for name in missing)}"
        return warning("mpirun", f"{detail}, refuses root, unlike horovodrun", remedy)
    return fine("mpirun", detail)


def _check_mpi4py(horovod: Properties) -> list[Finding]:
    remedy = "not needed for training; to use it: pip install mpi4py"
    if record.find_package("mpi4py") is None:
        return [warning("mpi4py", "is not installed", remedy)]
    mpi4py, done = _probe("mpi4py")
    if not mpi4py:
        return [warning("mpi4py", _describe_failure(done), remedy)]
    detail = f"{mpi4py['version']}, {mpi4py['mpi']}"
    if mpi4py["mpi_library"] != horovod["mpi_library"]:
        detail += f" of {mpi4py['mpi_library']}; Horovod's is {horovod['mpi_library']}"
        remedy = (
            "two MPIs crash a process: pip uninstall mpi4py, or put the mpicxx of its "
            f"MPI on the PATH and run {REPLACE}"
        )
        return [broken("mpi4py", detail, remedy)]
    return [fine("mpi4py", detail)]


def check_horovod(installed: Installed, horovod: Mapping[str, Any]) -> list[Finding]:
    """Return the findings on a Horovod that loads.

    Args:
        horovod: its properties, as `probe` prints them.
    """
    kinds = {"MPI": "mpi", "Gloo": "gloo", "NCCL": "nccl"}
    built = [name for name, key in kinds.items() if horovod[key]]
    build, directory = installed.build, installed.horovods[0]
    tensorflow = compatibility.tensorflow_of(directory) or "an unknown version"
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
