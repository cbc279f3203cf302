"""A directory by which the guards of a job's ranks find each other and make roll calls.

The guards of one host share a directory of that host. With a `model_dir`, the guards of
all ranks that see it share one in it. Files are renamed into place: a reader sees none
half written.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hvdtrain.flight import answer as answers
from hvdtrain.flight.answer import Answer, Member

T = TypeVar("T")
# Of a directory that a job has for its guards.
FOLDER = "flight"
_CALL, _CONCLUSION, _END = "call.json", "conclusion.json", "end.json"
_MEMBER, _ANSWER = "member-", "answer-"
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
            OSError: the directory cannot be written.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        for name in (_CALL, _CONCLUSION, _END):
            self._remove(name)
        for path in self.directory.glob(f"{_ANSWER}*"):
            self._remove(path.name)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def start_roll_call(self) -> str | None:
        """Make a call that all guards answer; None if another one is open.

        Raises:
            OSError: the directory is full, gone, or cannot be written.
        """
        identity = _unique()
        return identity if self._claim(_CALL, identity) else None

    def request_end(self, member: Member) -> bool:
        """Let the guard of a member kill its process; return whether none did before.

        True also where no file can be written.
        """
        try:
            return self._claim(_END, member.name)
        except OSError:
            return True

    def is_to_end(self, member: Member) -> bool:
        """Return whether a guard has requested the end of a member."""
        return self._read_text(_END) == member.name

    def _claim(self, name: str, value: str) -> bool:
        """Write a file that does not exist, or is old; return whether it did not."""
        path = self.directory / name
        with self._temporary(value) as temporary:
            # By the clock of the file system.
            now = temporary.stat().st_mtime
            with contextlib.suppress(FileNotFoundError):
                if now - path.stat().st_mtime > _CALL_SECONDS:
                    path.unlink()
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            # Readers skip a file that is not complete. Some file systems have no links.
            json.dump(value, file)
            return True
        return False

    def _read_text(self, name: str) -> str | None:
        try:
            return json.loads((self.directory / name).read_text())
        except (OSError, ValueError):
            return None

    def current_roll_call(self) -> str | None:
        """Return the call that is to be answered, if there is one."""
        return self._read_text(_CALL)

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
        """Remove all files of an earlier run of the job."""
        for prefix in (_MEMBER, _ANSWER, _CALL, _CONCLUSION, _END, "."):
            for path in self.directory.glob(f"{prefix}*"):
                self._remove(path.name)

    def _read_all(self, prefix: str, convert: Callable[[Any], T]) -> Iterator[T]:
        for path in sorted(self.directory.glob(f"{prefix}*")):
            # It may have been removed since, or be of another version.
            try:
                value = convert(json.loads(path.read_text()))
            except (OSError, ValueError, TypeError, KeyError):
                continue
            yield value

    def _write(self, name: str, values: object) -> None:
        with self._temporary(values) as temporary:
            temporary.replace(self.directory / name)

    @contextlib.contextmanager
    def _temporary(self, values: object) -> Iterator[pathlib.Path]:
        path = self.directory / f".{_unique()}"
        try:
            path.write_text(json.dumps(values))
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.directory / name).unlink(missing_ok=True)


def _unique() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
