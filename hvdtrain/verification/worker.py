"""One rank of a phase: python -m hvdtrain.verification.worker OPTIONS SCRIPT ..."""

import gc
import json
import os
import runpy
import sys

from hvdtrain.verification import recording
from hvdtrain.verification.trajectory import PhaseOptions


def main(options: PhaseOptions, command: list[str]) -> None:
    """Run the script until its last step.

    Args:
        command: a script, or `-m` and a module, and the arguments.
    """
    is_module = command[0] == "-m"
    script = command[1] if is_module else command[0]
    sys.argv = [script, *command[2 if is_module else 1 :]]
    # As Python itself does: the directory of a script, or the working directory.
    sys.path[0] = "" if is_module else os.path.dirname(os.path.abspath(script))
    # The recorder searches all objects at each step. This leaves out the objects of the
    # imports, which are hundreds of thousands.
    gc.freeze()
    with recording.record_phase(options):
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(PhaseOptions(**json.loads(sys.argv[1])), sys.argv[2:])
