"""Whether the ranks wait for a collective that another rank will never call."""

import dataclasses
from collections.abc import Sequence

from hvdtrain.environment import DEADLOCK
from hvdtrain.flight.answer import Answer, Member
from hvdtrain.flight.conclusion import conclude
from hvdtrain.flight.ring import Collective

_REASONS = (
    "Usual reasons: ranks with different numbers of batches (steps_per_epoch, or "
    "hvd.callbacks.JoinCallback), a callback that stops the training on one rank "
    "(hvd.callbacks.StopTogetherCallback), a collective that not all ranks call."
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The reason to end a job.

    Attributes:
        member: the rank that is the cause; None if all ranks are.
    """

    member: Member | None
    text: str


def find(answers: Sequence[Answer], *, seconds: float) -> Verdict | None:
    """Return why the ranks will wait for ever, by the answers of a roll call.

    Args:
        seconds: that all ranks of a deadlock have waited.
    """
    alive = [answer for answer in answers if answer.state in ("running", "silent")]
    waiting = [answer for answer in alive if answer.is_waiting]
    ended = f"{_REASONS} {DEADLOCK}={seconds:g}"
    if left := _left(alive, waiting):
        what = "its script" if left.has_ended_script else "its fit"
        name = f"rank {left.member.rank}"
        text = f"{conclude(answers)} {name} has already ended {what}. {ended}"
        return Verdict(left.member, text)
    if _is_deadlock(answers, waiting, seconds):
        return Verdict(None, f"{conclude(answers)} {ended}")
    return None


def find_failed(
    answers: Sequence[Answer], awaited: Collective, limit: str
) -> Verdict | None:
    """Return why a collective should have failed before now; None if it may go on.

    Horovod does not end a collective that all ranks have entered, and whose data is
    on the way for long. In `hvd.init` and at the end no data is.

    Args:
        limit: that the wait has reached.
    """
    has_data = awaited.operation not in ("init", "shutdown")
    if has_data and not any(_is_missing(answer, awaited) for answer in answers):
        return None
    return Verdict(None, f"{conclude(answers)} {limit}")


def _is_missing(answer: Answer, awaited: Collective) -> bool:
    """Return whether a rank does not take part in a collective of all ranks."""
    if answer.in_flight:
        return answer.state in ("stopped", "ended", "left")
    # One that has entered a later collective has sent what the others still receive.
    return answer.number < awaited.number


def _is_deadlock(
    answers: Sequence[Answer], waiting: Sequence[Answer], seconds: float
) -> bool:
    """Return whether all ranks of the job wait in different collectives."""
    if not answers or len(waiting) < answers[0].member.size:
        return False
    calls = {(a.in_flight.name, a.in_flight.operation) for a in waiting if a.in_flight}
    # A rank that has joined takes part in what the others call.
    has_joined = any(operation == "join" for _, operation in calls)
    is_long = all(answer.seconds >= seconds for answer in waiting)
    return len(calls) > 1 and is_long and not has_joined


def _left(answers: Sequence[Answer], waiting: Sequence[Answer]) -> Answer | None:
    """Return a rank that has ended the fit or the script in which others wait for it.

    A rank that runs the same code, and is late, has ended as many fits or fewer. Where
    threads train, the scripts of the waiting ranks may have ended as well.
    """
    calls = [a for a in waiting if a.in_flight and a.in_flight.operation != "join"]
    least = min((answer.fits for answer in calls), default=None)
    if least is None:
        return None
    are_in_scripts = not any(answer.has_ended_script for answer in calls)
    late = [
        answer
        for answer in answers
        if answer not in waiting
        and (answer.fits > least or (are_in_scripts and answer.has_ended_script))
    ]
    return late[0] if late else None
