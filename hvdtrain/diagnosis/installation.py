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

from hvdtrain.diagnosis.finding import Finding, broken, fine, run, warning

# Properties of a library by name, as `probe` prints them.
Properties = Mapping[str, Any]

_LOAD_SECONDS = 120
_SET_UP = "scripts/setup.sh sets up an environment of matching versions"
_SET_UP_GPU = "HOROVOD_GPU_OPERATIONS=NCCL scripts/setup.sh"
# The versions that hvdtrain supports. setup.cfg has the same ranges.
_KERAS_FIRST, _KERAS_LAST = (3, 12), (3, 15)
_TENSORFLOW_LINE = "2.21."


def check() -> list[Finding]:
    """Return the findings on the installed libraries and programs."""
    tensorflow, failures = load("TensorFlow", "tensorflow")
    horovod, horovod_failures = load("Horovod", "horovod")
    findings = [*failures, *horovod_failures]
    if tensorflow:
        findings += _check_tensorflow(tensorflow)
        findings.append(_check_native(tensorflow))
    if horovod:
        findings += _check_horovod(horovod, tensorflow)
    findings += _check_launchers(horovod)
    if horovod and horovod["mpi"]:
        findings += _check_mpi4py(horovod)
    findings += _check_gpus(tensorflow, horovod)
    return [fine("Python", f"{platform.python_version()}, {sys.executable}"), *findings]


@functools.cache
def load(topic: str, library: str) -> tuple[Properties | None, list[Finding]]:
    """Return the properties of a library, or None and a finding on the failure.

    Args:
        library: an argument of `probe`.
    """
    command = [sys.executable, "-m", "hvdtrain.diagnosis.probe", library]
    done = run(command, timeout_seconds=_LOAD_SECONDS)
    if done.code == 0:
        # The last line: libraries may print others at their import.
        return json.loads(done.output.splitlines()[-1]), []
    if done.code < 0:
        crashed = f"its import ended Python by signal {-done.code}"
        return None, [broken(topic, crashed, _SET_UP)]
    return None, [broken(topic, f"cannot be loaded: {done.last_lines}", _SET_UP)]


def _check_tensorflow(tensorflow: Properties) -> list[Finding]:
    detail = f"{tensorflow['version']}, Keras {tensorflow['keras']}"
    keras = tuple(int(number) for number in tensorflow["keras"].split(".")[:2])
    if not _KERAS_FIRST <= keras <= _KERAS_LAST:
        first, last = (".".join(map(str, v)) for v in (_KERAS_FIRST, _KERAS_LAST))
        remedy = f"hvdtrain hooks into Keras {first} to {last}: install one; {_SET_UP}"
        return [broken("TensorFlow", detail, remedy)]
    if not tensorflow["version"].startswith(_TENSORFLOW_LINE):
        remedy = f"hvdtrain is tested with {_TENSORFLOW_LINE}x"
        return [warning("TensorFlow", detail, remedy)]
    return [fine("TensorFlow", detail)]


def _check_native(tensorflow: Properties) -> Finding:
    obstacle = tensorflow["without_native"]
    if obstacle:
        remedy = "training works without, but slower"
        return warning("operations", obstacle, remedy)
    return fine("operations", "hvdtrain's own are built")


def _check_horovod(horovod: Properties, tensorflow: Properties | None) -> list[Finding]:
    kinds = {"MPI": "mpi", "Gloo": "gloo", "NCCL": "nccl"}
    built = [name for name, key in kinds.items() if horovod[key]]
    detail = (
        f"{horovod['version']}, built for TensorFlow {horovod['tensorflow']} with "
        f"{', '.join(built) or 'neither MPI nor Gloo'}"
    )
    if tensorflow and horovod["tensorflow"] != tensorflow["version"]:
        detail += f", and {tensorflow['version']} is installed"
        return [broken("Horovod", detail, f"build it again: {_SET_UP}")]
    if not (horovod["mpi"] or horovod["gloo"]):
        return [broken("Horovod", detail, f"build it with one of them: {_SET_UP}")]
    return [fine("Horovod", detail)]


def _check_launchers(horovod: Properties | None) -> list[Finding]:
    horovodrun, mpirun = shutil.which("horovodrun"), shutil.which("mpirun")
    own = pathlib.Path(sys.executable).parent
    remedy = f"put it on the PATH: PATH={own}:$PATH"
    findings = []
    if not horovodrun:
        findings.append(broken("horovodrun", "is not on the PATH", remedy))
    elif pathlib.Path(horovodrun).parent != own and (own / "horovodrun").exists():
        detail = f"{horovodrun} belongs to another Python than {sys.executable}"
        findings.append(warning("horovodrun", detail, remedy))
    else:
        findings.append(
            fine("horovodrun", f"{horovodrun}, {_describe_controller(horovod, mpirun)}")
        )
    if mpirun:
        findings.append(_check_mpirun(mpirun))
    elif horovod and horovod["mpi"]:
        remedy = "only Gloo can be used; put the MPI's bin directory on the PATH"
        findings.append(warning("mpirun", "is not on the PATH", remedy))
    return findings


def _describe_controller(horovod: Properties | None, mpirun: str | None) -> str:
    chosen = os.environ.get("HOROVOD_CONTROLLER")
    if chosen:
        return f"takes {chosen}, from HOROVOD_CONTROLLER"
    if horovod and horovod["mpi"] and mpirun:
        return "takes MPI without --gloo"
    return "takes Gloo"


def _check_mpirun(mpirun: str) -> Finding:
    done = run([mpirun, "--version"], timeout_seconds=20)
    if done.code:
        remedy = "repair the MPI, or launch by horovodrun --gloo"
        return broken("mpirun", f"{mpirun} fails: {done.last_lines}", remedy)
    return fine("mpirun", f"{mpirun}, {done.output.strip().partition(chr(10))[0]}")


def _check_mpi4py(horovod: Properties) -> list[Finding]:
    mpi4py, failures = load("mpi4py", "mpi4py")
    if not mpi4py:
        remedy = "not needed for training; to use it: pip install mpi4py"
        return [warning("mpi4py", failures[0].detail, remedy)]
    detail = f"{mpi4py['version']}, {mpi4py['mpi']}"
    if mpi4py["mpi_library"] != horovod["mpi_library"]:
        detail += f" of {mpi4py['mpi_library']}; Horovod's is {horovod['mpi_library']}"
        remedy = f"two MPIs crash a process: build both with one; {_SET_UP}"
        return [broken("mpi4py", detail, remedy)]
    return [fine("mpi4py", detail)]


def _check_gpus(
    tensorflow: Properties | None, horovod: Properties | None
) -> list[Finding]:
    nvidia = run(["nvidia-smi", "--list-gpus"], timeout_seconds=30)
    count = len(nvidia.output.splitlines()) if nvidia.code == 0 else 0
    seen = tensorflow["gpus"] if tensorflow else 0
    if seen < count and not os.environ.get("CUDA_VISIBLE_DEVICES"):
        detail = f"{count} in the machine, TensorFlow sees {seen}"
        remedy = f"install TensorFlow with CUDA: {_SET_UP_GPU}"
        return [warning("GPU", detail, remedy)]
    if seen and horovod and not horovod["nccl"]:
        detail = f"TensorFlow sees {seen}, Horovod was built without NCCL"
        remedy = f"gradients are copied through the CPU; build it: {_SET_UP_GPU}"
        return [warning("GPU", detail, remedy)]
    return [fine("GPU", f"{seen} of {count}" if count else "none, training on CPUs")]
