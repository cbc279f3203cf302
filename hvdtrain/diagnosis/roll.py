"""A roll call of a job that runs, or the records of one that has ended."""

import math
import pathlib

from hvdtrain.flight import answer as answers
from hvdtrain.flight import conclusion
from hvdtrain.flight.answer import Answer
from hvdtrain.flight.meeting import FOLDER, Meeting
from hvdtrain.job import JobError


def report(directory: str) -> str:
    """Return what the ranks of a job do, or did last.

    Args:
        directory: `model_dir` of the job, or where its ranks have left their records.

    Raises:
        JobError: it has no records, or another roll call is going on.
    """
    meeting = _meeting(pathlib.Path(directory))
    members = meeting.members()
    if not members:
        raise JobError(
            f"Received --job={directory}; expected the model_dir of a job that runs "
            "under a launcher or has failed, or the directory that it has printed."
        )
    has_guards = _has_guards(meeting)
    given = _call(meeting) if has_guards else _last(meeting)
    size = max(member.size for member in members)
    heard = {answer.member.rank for answer in given}
    missing = sorted(set(range(size)) - heard)
    lines = [conclusion.conclude(given), conclusion.first_difference(given)]
    kept = meeting.conclusion(within_seconds=math.inf)
    if kept and not has_guards:
        lines.insert(0, kept)
    if missing:
        lines.append(f"No records here of rank {', '.join(map(str, missing))}.")
    stacks = [answer for answer in given if answer.stacks]
    return "\n".join([*filter(None, lines), conclusion.stacks_text(stacks)]).rstrip()


def _meeting(directory: pathlib.Path) -> Meeting:
    inside = directory / FOLDER
    return Meeting(inside if inside.is_dir() else directory)


def _has_guards(meeting: Meeting) -> bool:
    ended = {answer.member for answer in meeting.answers("")}
    return any(member not in ended for member in meeting.members())


def _call(meeting: Meeting) -> list[Answer]:
    call = meeting.call()
    if not call:
        raise JobError(
            f"Another roll call is going on in {meeting.directory}: try again in some "
            "seconds."
        )
    try:
        return [_by_ring(answer) for answer in meeting.wait_for_answers(call)]
    finally:
        meeting.close_call()


def _last(meeting: Meeting) -> list[Answer]:
    return [answer for answer in meeting.answers() if answer.state in ("ended", "left")]


def _by_ring(answer: Answer) -> Answer:
    """Return the last records of a rank whose guard was killed with it."""
    if answer.state != "silent" or not answer.member.is_here:
        return answer
    if answers.process_state(answer.member.pid):
        return answer
    cause = "was killed together with its guard"
    return answers.observe(answer.member, state="ended", cause=cause)
