"""What one rank does at the moment of a roll call, or did when its process ended."""

import ctypes
import dataclasses
import os
import pathlib
import signal
import socket
import time
from typing import Any

from hvdtrain.flight import ring
from hvdtrain.flight.ring import Collective
from hvdtrain.flight.stacks import Place, find_place, has_ended_script

# Number of the system call `tgkill`, for which older glibc has no function.
_TGKILL = {"x86_64": 234, "aarch64": 131}.get(os.uname().machine)
_SHOWN_WORDS = 3
# A collective takes less than this where no rank is late.
WAIT_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of the job, as its guard describes it.

    Attributes:
        ring: path of its ring, on its host.
    """

    rank: int
    size: int
    host: str
    pid: int
    ring: str

    @property
    def name(self) -> str:
        """The part of the names of its files."""
        return f"{self.host}-{self.pid}"

    @property
    def is_here(self) -> bool:
        """Whether this process can read the ring."""
        return self.host == socket.gethostname() and os.path.exists(self.ring)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a rank does.

    Attributes:
        state: "running"; "stopped", as by SIGSTOP; "silent", where the process exists
            and its stacks cannot be read; "done" and "left", by Python's exit in a job
            that has not failed and in one that has; "ended" otherwise.
        cause: why it has left or ended, in words that follow "rank 1 on host".
        phase: of `ring.PHASES`, empty without a ring.
        seconds: in the collective that it is in, or else in its phase.
        step: that it takes, from 1; 0 where nothing counts steps.
        number: of the last collective of all ranks that it has entered.
        fits: trainings by Keras' `fit` that it has ended.
        in_flight: the collective that it is in.
        stacks: of all threads, as `faulthandler` writes them.
        collectives: the last ones, the oldest first, timed by its host's clock.
    """

    member: Member
    state: str
    cause: str = ""
    phase: str = ""
    seconds: float = 0.0
    step: int = 0
    number: int = 0
    fits: int = 0
    in_flight: Collective | None = None
    stacks: str = ""
    collectives: tuple[Collective, ...] = ()

    @property
    def is_waiting(self) -> bool:
        """Whether it has been in a collective for longer than a collective takes."""
        return self.in_flight is not None and self.seconds >= WAIT_SECONDS

    @property
    def place(self) -> Place | None:
        """Where it is in the user's code."""
        return find_place(self.stacks)

    @property
    def has_ended_script(self) -> bool:
        """Whether it only waits for threads that are not daemons, before it exits."""
        return has_ended_script(self.stacks)

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold; see `from_dict`."""
        return dataclasses.asdict(self)


def from_dict(values: dict[str, Any]) -> Answer:
    """Return the answer that `Answer.as_dict` has converted.

    Raises:
        TypeError: `values` has other fields than an answer.
    """
    in_flight = values["in_flight"]
    return Answer(
        **values
        | {
            "member": Member(**values["member"]),
            "in_flight": Collective(**in_flight) if in_flight else None,
            "collectives": tuple(Collective(**each) for each in values["collectives"]),
        }
    )


def observe(
    member: Member, *, state: str, cause: str = "", stack_text: str = ""
) -> Answer:
    """Return the answer of a rank of this host, with what its ring holds."""
    answer = Answer(member, state, cause, stacks=stack_text)
    records = ring.read(member.ring)
    if not records:
        return answer
    in_flight = records.in_flight
    since = in_flight.entered if in_flight else records.phase_entered
    return dataclasses.replace(
        answer,
        phase=records.phase,
        seconds=max(0.0, time.monotonic() - since),
        step=records.step,
        number=records.number,
        fits=records.fits,
        in_flight=in_flight,
        collectives=records.collectives,
    )


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def command(pid: int) -> str:
    """Return the first words of the command line of a process."""
    try:
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words[:_SHOWN_WORDS]).decode(errors="replace").strip()


def request_stacks(pid: int, *, thread: int) -> None:
    """Send SIGQUIT to a thread that makes no other system calls.

    A handled signal interrupts the system call of the thread that receives it, and
    `nanosleep`, `poll` and some others are not restarted. A signal to the process would
    be received by its main thread.
    """
    if _TGKILL is None:
        os.kill(pid, signal.SIGQUIT)
    else:
        ctypes.CDLL(None).syscall(_TGKILL, pid, thread, signal.SIGQUIT)
