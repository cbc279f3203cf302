"""The finding of a check, and commands with a time limit."""

import dataclasses
import os
import signal
import subprocess

from hvdtrain.job.launchers import without_launch


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        topic: the subject of the check, a word or two.
        status: fine, warning (it works, but slowly, or not everywhere) or broken.
        detail: what was found.
        remedy: what to do about it; empty where all is fine.
    """

    topic: str
    status: str
    detail: str
    remedy: str = ""


def fine(topic, detail):
    """Return the finding that nothing is wrong."""
    return Finding(topic, "fine", detail)


def warning(topic, detail, remedy):
    """Return the finding that something works, but slowly or not everywhere."""
    return Finding(topic, "warning", detail, remedy)


def broken(topic, detail, remedy):
    """Return the finding that training cannot work."""
    return Finding(topic, "broken", detail, remedy)


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a command.

    Attributes:
        code: its exit code; 127 if it does not exist, 124 if it took too long.
        output: its standard output.
        errors: its standard error.
    """

    code: int
    output: str
    errors: str

    @property
    def last_lines(self):
        """The last three lines of its errors, or else of its output, in one line."""
        lines = (self.errors.strip() or self.output.strip()).splitlines()
        return " ".join(line.strip() for line in lines[-3:]) or f"exit code {self.code}"


def run(command, *, timeout_seconds):
    """Run a command and return its `Result`.

    Args:
        command: a list of strings.
        timeout_seconds: after it the command is killed, with its child processes.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Under a launcher the command would join its job as one more rank.
            env=without_launch(os.environ),
            start_new_session=True,
        )
    except OSError as error:
        return Result(127, "", f"{command[0]}: {error.strerror}")
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Result(124, "", f"no answer within {timeout_seconds:g} s")
    return Result(process.returncode, output, errors)
