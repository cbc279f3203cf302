"""A finding, and how a command is asked with a limit on its time."""

import dataclasses
import os
import signal
import subprocess

from hvdtrain.job.launchers import without_launch


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        topic: what was looked at, a word or two.
        status: fine, warning (it works, but not well, or not everywhere) or broken.
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
    """Return the finding that something works, but not well or not everywhere."""
    return Finding(topic, "warning", detail, remedy)


def broken(topic, detail, remedy):
    """Return the finding that training cannot work like this."""
    return Finding(topic, "broken", detail, remedy)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command said.

    Attributes:
        code: its exit code; 127 if it does not exist, 124 if it took too long.
        output: its standard output.
        errors: its standard error.
    """

    code: int
    output: str
    errors: str

    @property
    def last_words(self):
        """The end of what it said, in one line."""
        lines = (self.errors.strip() or self.output.strip()).splitlines()
        return " ".join(line.strip() for line in lines[-3:]) or f"exit code {self.code}"


def ask(command, *, timeout_seconds):
    """Run a command and return its `Answer`.

    Args:
        command: list of words.
        timeout_seconds: after it the command is killed, with all that it started.
    """
    # Otherwise the command would take itself for a rank of the job around us.
    environ = without_launch(os.environ)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environ,
            start_new_session=True,
        )
    except OSError as error:
        return Answer(127, "", f"{command[0]}: {error.strerror}")
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Answer(124, "", f"no answer within {timeout_seconds:g} s")
    return Answer(process.returncode, output, errors)
