"""GPUs: whether TensorFlow sees them and has kernels for them, and Horovod's NCCL.

Not yet run on a GPU.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.doctor.finding import Finding, broken, fine, run, warning
from hvdtrain.install.compatibility import INSTALL

_INSTALL_GPU = f"HOROVOD_GPU_OPERATIONS=NCCL {INSTALL}"
# Machine code is "sm_80", which GPUs of the same major version run from that minor
# version on; "compute_90" is machine code and also PTX, which later GPUs compile.
# Code with a letter, "sm_90a" or "sm_100f", is for one GPU or for one major version.
_CODE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
_OTHER_TENSORFLOW = (
    "use a TensorFlow that was built for this GPU, such as a newer one or the one in "
    "NVIDIA's container"
)


def check(
    tensorflow: Mapping[str, Any] | None, horovod: Mapping[str, Any] | None
) -> list[Finding]:
    """Return the findings on the GPUs of this machine.

    Args:
        tensorflow: its properties, as `probe` prints them; None without one.
        horovod: the same of Horovod.
    """
    nvidia = run(["nvidia-smi", "--list-gpus"], timeout_seconds=30)
    count = len(nvidia.output.splitlines()) if nvidia.code == 0 else 0
    seen = len(tensorflow["gpus"]) if tensorflow else 0
    if seen < count and not os.environ.get("CUDA_VISIBLE_DEVICES"):
        detail = f"{count} in the machine, TensorFlow sees {seen}"
        remedy = (
            "pip uninstall tensorflow-cpu, pip install 'hvdtrain[gpu]', "
            f"then {_INSTALL_GPU}"
        )
        return [warning("GPU", detail, remedy)]
    findings = check_kernels(tensorflow) if tensorflow else []
    if seen and horovod and not horovod["nccl"]:
        detail = f"TensorFlow sees {seen}, Horovod was built without NCCL"
        remedy = f"gradients are copied through the CPU; run {_INSTALL_GPU}"
        return [warning("GPU", detail, remedy), *findings]
    detail = f"{seen} of {count}" if count else "none, training on CPUs"
    return [fine("GPU", detail), *findings]


def check_kernels(tensorflow: Mapping[str, Any]) -> list[Finding]:
    """Return the finding on the kernels of TensorFlow for each kind of GPU.

    Args:
        tensorflow: `gpus` has the compute capability of each GPU, such as (9, 0) or
            None; `built_for` what `tf.sysconfig.get_build_info` says, such as "sm_80".
    """
    built = tensorflow["built_for"]
    kinds = {tuple(gpu) for gpu in tensorflow["gpus"] if gpu}
    return [_check_kind(kind, built) for kind in sorted(kinds)] if built else []


def _check_kind(gpu: tuple[int, int], built: Iterable[str]) -> Finding:
    topic = "GPU kernels"
    detail = (
        f"the compute capability is {gpu[0]}.{gpu[1]}, TensorFlow was built for "
        f"{', '.join(built)}"
    )
    codes = [match.groups() for name in built if (match := _CODE.fullmatch(name))]
    versions = [(kind, (int(a), int(b)), letter) for kind, a, b, letter in codes]
    if any(_runs(gpu, version, letter) for _, version, letter in versions):
        return fine(topic, detail)
    has_ptx = any(
        kind == "compute" and version <= gpu and not letter
        for kind, version, letter in versions
    )
    if not has_ptx:
        return broken(topic, f"{detail}: it cannot compute there", _OTHER_TENSORFLOW)
    compiled = (
        f"{detail}: the driver compiles its kernels at the first step, 30 minutes or "
        "longer, and some fail with CUDA_ERROR_INVALID_PTX or CUDA_ERROR_INVALID_HANDLE"
    )
    return warning(topic, compiled, _OTHER_TENSORFLOW)


def _runs(gpu: tuple[int, int], built: tuple[int, int], letter: str) -> bool:
    """Return whether a GPU runs machine code."""
    if letter == "a":
        return gpu == built
    return gpu[0] == built[0] and gpu[1] >= built[1]
