"""Starts a program as several ranks of this host, also where a platform starts hosts.

python -m hvdtrain.launch --nproc_per_node=2 train.py --epochs=3
python -m hvdtrain.launch --nproc_per_node=auto -m hvdtrain.mnist --model_dir=run

Arguments: a Python script, or with -m a module, and its own arguments.

On one machine, the job has --nproc_per_node ranks. Where a platform starts a process on
each of several hosts, and describes them by TF_CONFIG, RANK and WORLD_SIZE, SM_HOSTS,
CLUSTER_SPEC or HVDTRAIN_SIZE, let it start this program on each: the job has
--nproc_per_node ranks on each host.

The first rank that fails ends the others on its host, and this program with its exit
code. Those on other hosts fail at their next collective. SIGTERM, SIGINT, SIGHUP,
SIGUSR1 and SIGUSR2 ask the ranks to stop within HOROVOD_TERMINATION_SECONDS.
"""

import itertools
import os
import pathlib
import re
import signal
import sys
import time

from absl import flags

from hvdtrain import environment, interruption, program
from hvdtrain.job import JobError, cores, declared_size, platforms, signals
from hvdtrain.runner.caller import run_once
from hvdtrain.runner.engine import Local, RunError
from hvdtrain.runner.results import LostRankError, Work

# What follows the script are its own flags.
flags.FLAGS.set_gnu_getopt(False)

_RANKS = flags.DEFINE_string(
    "nproc_per_node",
    "auto",
    "Ranks on this host. auto: as many as it has GPUs; without one, as many as cores.",
)
_MODULE = flags.DEFINE_bool(
    "module", False, "The program is a module, as of python -m.", short_name="m"
)

# A launcher or a batch system may deliver one request twice.
_SAME_REQUEST_SECONDS = 1.0
_START_SECONDS = 60.0
_DEVICES = pathlib.Path("/dev")


# For flags of torchrun.
_HOSTS = (
    "for several hosts, start this program on each, with HVDTRAIN_SIZE (their number), "
    "HVDTRAIN_RANK and HVDTRAIN_ADDRESS (host:port of the first) in its environment"
)
_REMEDIES = dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"), _HOSTS)


@flags.validator("nproc_per_node", "expected a number, 1 or more, or auto")
def _check_ranks(value: str) -> bool:
    return value == "auto" or (value.isdigit() and int(value) > 0)


class FailedRankError(JobError):
    """A rank has failed; this process ends with its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _StopRequest:
    """The first signal that this process has received."""

    def __init__(self) -> None:
        self.number = 0
        self._seconds = 0.0

    def receive(self, number: int) -> bool:
        """Keep the first signal; a later one ends this process, and so the ranks."""
        now = time.monotonic()
        if self.number and now - self._seconds > _SAME_REQUEST_SECONDS:
            return False
        self.number, self._seconds = self.number or number, self._seconds or now
        return True


def main(command: list[str]) -> None:
    """Start the ranks, and wait for their end."""
    request = _StopRequest()
    signals.subscribe(interruption.SIGNALS, request.receive)
    work = Work(
        command=(sys.executable, *(["-m"] if _MODULE.value else []), *command),
        task=_read_task(),
        stop_signal=lambda: request.number,
        stop_seconds=_stop_seconds(),
    )
    try:
        run_once(Local(), work, _ranks(), start_timeout_seconds=_START_SECONDS)
    except LostRankError as error:
        cause, code = str(error).removesuffix("."), error.exit_code
        text = f"The first rank that failed: {cause}."
        if number := request.number:
            text = f"Stopped by {signal.Signals(number).name}: {cause}."
            code = 128 + number if code == 128 + signal.SIGTERM else code
        raise FailedRankError(text, code) from None
    except RunError as error:
        raise JobError(str(error)) from None


def _read_task() -> platforms.PlatformTask | None:
    if os.environ.get("HVDTRAIN_ALONE") == "1":
        return None
    task = platforms.read(os.environ)
    if not task or "HOROVOD_RANK" in os.environ:
        # Each of the ranks of another launcher would start a job of its own.
        declared_size.check(size=1)
    return task


def _stop_seconds() -> float:
    try:
        return environment.termination_seconds()
    except ValueError as error:
        raise JobError(str(error)) from None


def _ranks() -> int:
    if _RANKS.value != "auto":
        return int(_RANKS.value)
    # Not yet run on a GPU.
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        # CUDA ends at the first that is none, such as -1.
        is_device = re.compile(r"\s*[0-9a-zA-Z]").match
        gpus = len(list(itertools.takewhile(is_device, visible)))
    else:
        names = (path.name for path in _DEVICES.iterdir())
        gpus = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in names)
    return gpus or cores.usable(1)


if __name__ == "__main__":
    program.run(main, page=__doc__, operands="PROGRAM", remedies=_REMEDIES)
