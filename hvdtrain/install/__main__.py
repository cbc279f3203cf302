"""Installs Horovod and hvdtrain's native operations into this Python environment.

pip install 'hvdtrain[cpu]'
python -m hvdtrain.install
python -m hvdtrain.install --wheels=DIR      stores what it builds there, for others
HVDTRAIN_WHEELS=DIR-or-URL python -m hvdtrain.install      installs what is there

Takes seconds from wheels; else it builds, which takes two minutes on two cores and
needs a C++ compiler. Uses the MPI of the first mpicxx on the PATH, else installs Open
MPI as a package. Then two ranks prove that it works. Calling it again does nothing.

The variables HOROVOD_* of Horovod's build are passed on to it, and later calls keep
them: HOROVOD_GPU_OPERATIONS=NCCL for NVIDIA GPUs, HOROVOD_GPU_OPERATIONS= to go back.
Wheels that were built are kept in HVDTRAIN_CACHE_DIR (~/.cache/hvdtrain).
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from absl import flags

from hvdtrain import program
from hvdtrain.install import cache, installing
from hvdtrain.install.commands import InstallError
from hvdtrain.job import JobError, signals

_WHEELS = flags.DEFINE_string(
    "wheels",
    None,
    "A directory of wheels. What it lacks for this environment is built, made portable "
    "and stored there. HVDTRAIN_WHEELS is a directory or an address to read from.",
)
_SOURCE = flags.DEFINE_string(
    "source",
    None,
    "Horovod's source archive, for a machine that is offline.",
)
_REPLACE = flags.DEFINE_bool(
    "replace", False, "Install also where a Horovod works, such as another package's."
)
_QUIET = flags.DEFINE_bool("quiet", False, "Print nothing if nothing is to be done.")


def main() -> None:
    """Install; raise `JobError` for what a user can correct."""
    options = installing.InstallOptions(
        wheels=pathlib.Path(_WHEELS.value).absolute() if _WHEELS.value else None,
        wheels_to_read=os.environ.get("HVDTRAIN_WHEELS") or None,
        source=pathlib.Path(_SOURCE.value).absolute() if _SOURCE.value else None,
        replace=_REPLACE.value,
        quiet=_QUIET.value,
    )
    signals.subscribe((signal.SIGINT, signal.SIGTERM), _abort)
    try:
        installing.install(options)
    except InstallError as error:
        raise JobError(str(error)) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(
            f"The installation failed: {error}. It writes to {tempfile.gettempdir()} "
            f"(TMPDIR), {cache.directory()} (HVDTRAIN_CACHE_DIR) and {sys.prefix}."
        ) from None


def _abort(number: int) -> bool:
    installing.abort()
    # Not handled: the process ends as programs do.
    return False


if __name__ == "__main__":
    program.run(main, page=__doc__)
