"""The finding of a check, and the run of a command with a time limit."""

import dataclasses
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Literal

from hvdtrain.job.launchers import without_launch


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        topic: the subject of the check, a word or two.
        status: fine, warning (it works, but slowly, or not everywhere) or broken.
        detail: the values that the check read.
        remedy: what the user can do; empty where all is fine.
    """

    topic: str
    status: Literal["fine", "warning", "broken"]
    detail: str
    remedy: str = ""


def fine(topic: str, detail: str) -> Finding:
    """Return the finding that nothing is wrong."""
    return Finding(topic, "fine", detail)


def warning(topic: str, detail: str, remedy: str) -> Finding:
    """Return the finding that something works, but slowly or not everywhere."""
    return Finding(topic, "warning", detail, remedy)


def broken(topic: str, detail: str, remedy: str) -> Finding:
    """Return the finding that training cannot work."""
    return Finding(topic, "broken", detail, remedy)


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """The exit code of a command, its standard output and its standard error.

    The code is 127 if the command does not exist, and 124 after the time limit.
    """

    code: int
    output: str
    errors: str

    @property
    def last_lines(self) -> str:
        """The last three lines of the errors, or else of the output, in one line."""
        lines = (self.errors.strip() or self.output.strip()).splitlines()
        return " ".join(line.strip() for line in lines[-3:]) or f"exit code {self.code}"


def run(command: Sequence[str], *, timeout_seconds: float) -> CommandResult:
    """Run a command. After the time limit, kill it with its child processes."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Under a launcher's variables the command would join the job as a rank.
            env=without_launch(os.environ),
            start_new_session=True,
        )
    except OSError as error:
        return CommandResult(127, "", f"{command[0]}: {error.strerror}")
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return CommandResult(124, "", f"no answer within {timeout_seconds:g} s")
    return CommandResult(process.returncode, output, errors)
