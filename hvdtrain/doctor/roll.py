"""A roll call of a job that runs, or the records of one that has ended."""

import math
import pathlib

from hvdtrain import processes
from hvdtrain.flight import answer as answers
from hvdtrain.flight import conclusion
from hvdtrain.flight.answer import Answer
from hvdtrain.flight.shared_directory import FOLDER, SharedDirectory
from hvdtrain.job import JobError
from hvdtrain.open_directory import OpenDirectory


def report(directory: str) -> str:
    """Return what the ranks of a job do, or did last.

    Args:
        directory: `model_dir` of the job, or where its ranks have left their records.

    Raises:
        JobError: it has no records, or another roll call is going on.
    """
    shared = _shared_directory(pathlib.Path(directory))
    members = shared.members()
    if not members:
        raise JobError(
            f"Received --job={directory}; expected the model_dir of a job that runs "
            "under a launcher or has failed, or the directory that it has printed."
        )
    has_guards = _has_guards(shared)
    given = _call(shared) if has_guards else _last(shared)
    size = max(member.size for member in members)
    heard = {answer.member.rank for answer in given}
    missing = sorted(set(range(size)) - heard)
    lines = [conclusion.conclude(given), conclusion.first_difference(given)]
    kept = shared.conclusion(within_seconds=math.inf)
    if kept and not has_guards:
        lines.insert(0, kept)
    if missing:
        lines.append(f"No records here of rank {', '.join(map(str, missing))}.")
    stacks = [answer for answer in given if answer.stacks]
    return "\n".join([*filter(None, lines), conclusion.stacks_text(stacks)]).rstrip()


def _shared_directory(directory: pathlib.Path) -> SharedDirectory:
    inside = directory / FOLDER
    shared = SharedDirectory(inside if inside.is_dir() else directory)
    try:
        with OpenDirectory(shared.directory):
            return shared
    except PermissionError as error:
        raise JobError(
            f"Cannot read {shared.directory}: {error.strerror}; expected a directory "
            "of the user who calls this: call it as the user of the job."
        ) from None
    except OSError:
        return shared


def _has_guards(shared: SharedDirectory) -> bool:
    ended = {answer.member for answer in shared.answers("")}
    return any(member not in ended for member in shared.members())


def _call(shared: SharedDirectory) -> list[Answer]:
    try:
        call = shared.start_roll_call()
    except OSError as error:
        raise JobError(f"Cannot make a roll call: {error}.") from error
    if not call:
        raise JobError(
            f"Another roll call is going on in {shared.directory}: try again in some "
            "seconds."
        )
    try:
        return [_by_ring(answer) for answer in shared.wait_for_answers(call)]
    finally:
        shared.end_roll_call()


def _last(shared: SharedDirectory) -> list[Answer]:
    return [answer for answer in shared.answers() if answer.state in ("ended", "left")]


def _by_ring(answer: Answer) -> Answer:
    """Return the last records of a rank whose guard was killed with it."""
    if answer.state != "silent" or not answer.member.is_here:
        return answer
    if processes.read_state(answer.member.pid):
        return answer
    cause = "was killed together with its guard"
    return answers.observe(answer.member, state="ended", cause=cause)
