"""A directory by which the guards of a job's ranks find each other and make roll calls.

The guards of one host share a directory of that host. With a `model_dir`, the guards of
all ranks that see it share one in it. Files are renamed into place: a reader sees none
half written. Files and directories of other users are neither read nor removed.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hvdtrain.flight import answer as answers
from hvdtrain.flight.answer import Answer, Member
from hvdtrain.open_directory import OpenDirectory

T = TypeVar("T")
# The name of a directory that a job has for its guards.
FOLDER = "flight"
_CALL, _CONCLUSION, _END = "call.json", "conclusion.json", "end.json"
_MEMBER, _ANSWER = "member-", "answer-"
_NAMES = re.compile(rf"({_MEMBER}|{_ANSWER}).+\.json|{_CALL}|{_CONCLUSION}|{_END}")
# A call is older than this only if the process that made it was killed; a request, if
# it is of an earlier job.
_CALL_SECONDS = 30.0
# A guard looks for calls every second, and waits for the stacks for three; a network
# file system may show a new file late.
_ANSWER_SECONDS, _POLL_SECONDS = 8.0, 0.1


@dataclasses.dataclass(frozen=True)
class SharedDirectory:
    """The files of a directory, which other processes change meanwhile."""

    directory: pathlib.Path

    def add(self, member: Member) -> None:
        """Add a member, or replace its rank.

        Raises:
            OSError: the directory cannot be written, or belongs to another user.
        """
        with OpenDirectory(self.directory, make=True):
            pass
        self._write(f"{_MEMBER}{member.name}.json", dataclasses.asdict(member))

    def members(self) -> list[Member]:
        """Return the members by rank."""
        members = self._read_all(_MEMBER, lambda values: Member(**values))
        return sorted(members, key=lambda member: member.rank)

    def remove(self, member: Member, *, keeps_answer: bool = False) -> None:
        """Remove a member and its answer, and the directory after the last member."""
        for prefix in (_MEMBER, *(() if keeps_answer else (_ANSWER,))):
            self._remove(f"{prefix}{member.name}.json")
        if self.members():
            return
        with contextlib.suppress(OSError):
            with OpenDirectory(self.directory) as files:
                for name in filter(_NAMES.fullmatch, files.names()):
                    files.remove(name)
            self.directory.rmdir()

    def start_roll_call(self) -> str | None:
        """Make a call that all guards answer; None if another one is open.

        Raises:
            OSError: the directory is full, gone, or cannot be written.
        """
        call = f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
        return call if self._claim(_CALL, call) else None

    def request_end(self, member: Member, reason: str) -> bool:
        """Let the guard of a member kill its process; return whether none did before.

        True also where no file can be written.
        """
        try:
            return self._claim(_END, [member.name, reason])
        except OSError:
            return True

    def requested_end(self, member: Member) -> str:
        """Return why a guard has requested the end of a member; empty if none has."""
        name, reason = self._read(_END) or ("", "")
        return reason if name == member.name else ""

    def current_roll_call(self) -> str | None:
        """Return the call that is to be answered, if there is one."""
        return self._read(_CALL)

    def wait_for_answers(self, call: str) -> list[Answer]:
        """Return the answers of all members by rank, also of those that are silent."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            given = self.answers(call)
            heard = {answer.member for answer in given}
            silent = [Answer(m, "silent") for m in self.members() if m not in heard]
            if not silent or time.monotonic() > deadline:
                return sorted([*given, *silent], key=lambda answer: answer.member.rank)
            time.sleep(_POLL_SECONDS)

    def end_roll_call(self) -> None:
        """End the call of this process."""
        self._remove(_CALL)

    def write_answer(self, call: str, given: Answer) -> None:
        """Write a rank's answer to a call; "" without one, when its process ends."""
        name = f"{_ANSWER}{given.member.name}.json"
        with contextlib.suppress(OSError):
            self._write(name, {"call": call, "answer": given.as_dict()})

    def answers(self, call: str | None = None) -> list[Answer]:
        """Return the answers to a call and the last ones of ended ranks, by rank.

        Without a call, return the newest of each rank.
        """
        read = self._read_all(
            _ANSWER, lambda v: (v["call"], answers.from_dict(v["answer"]))
        )
        given = [answer for to, answer in read if call is None or to in ("", call)]
        return sorted(given, key=lambda answer: answer.member.rank)

    def has_failed(self) -> bool:
        """Return whether a rank of the job has ended, or left with an error."""
        return any(answer.state in ("ended", "left") for answer in self.answers())

    def write_stacks(self, step: int, text: str) -> pathlib.Path:
        """Write a file to the model_dir that has this directory; return its path.

        Raises:
            OSError: the file cannot be written.
        """
        folder = self.directory.parent / "errors"
        name = f"stacks-step-{step}.txt"
        with OpenDirectory(folder, make=True, is_private=False) as files:
            files.write(name, text)
        return folder / name

    def write_conclusion(self, text: str) -> None:
        """Keep a conclusion, for the message with which ranks fail."""
        with contextlib.suppress(OSError):
            self._write(_CONCLUSION, {"seconds": time.time(), "text": text})

    def remove_conclusion(self) -> None:
        """Keep no conclusion: the job goes on."""
        self._remove(_CONCLUSION)

    def conclusion(self, *, within_seconds: float) -> str:
        """Return the conclusion of the last seconds; empty if there is none."""
        read = self._read_all(_CONCLUSION, lambda v: (v["seconds"], v["text"]))
        for seconds, text in read:
            if time.time() - seconds <= within_seconds:
                return text
        return ""

    def remove_lost(self) -> None:
        """Remove the answers of ranks that have ended."""
        for answer in self.answers(""):
            self._remove(f"{_ANSWER}{answer.member.name}.json")
            self._remove(f"{_MEMBER}{answer.member.name}.json")

    def clear(self) -> None:
        """Remove all files of an earlier run of the job, and no others.

        Raises:
            OSError: the directory belongs to another user, or cannot be written.
        """
        with (
            contextlib.suppress(FileNotFoundError),
            OpenDirectory(self.directory) as files,
        ):
            files.remove_all(_NAMES)

    def _read_all(self, prefix: str, convert: Callable[[Any], T]) -> Iterator[T]:
        with contextlib.suppress(OSError), OpenDirectory(self.directory) as files:
            for name in files.names():
                # It may have been removed since, or be of another version.
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                    if name.startswith(prefix):
                        yield convert(json.loads(files.read(name)))

    def _read(self, name: str) -> Any:
        """Return the value in a file; None if it cannot be read."""
        with (
            contextlib.suppress(OSError, ValueError),
            OpenDirectory(self.directory) as files,
        ):
            return json.loads(files.read(name))
        return None

    def _claim(self, name: str, value: object) -> bool:
        """Write a file that does not exist, or is old; return whether it did not."""
        with OpenDirectory(self.directory) as files:
            return files.claim(name, json.dumps(value), stale_seconds=_CALL_SECONDS)

    def _write(self, name: str, values: object) -> None:
        with OpenDirectory(self.directory) as files:
            files.write(name, json.dumps(values))

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError), OpenDirectory(self.directory) as files:
            files.remove(name)
