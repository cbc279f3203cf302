"""Which rank holds up the others, and where it is: from the answers of a roll call."""

import itertools
from collections.abc import Iterable, Sequence

from hvdtrain.environment import STALL_SHUTDOWN
from hvdtrain.flight.answer import Answer
from hvdtrain.flight.ring import Collective
from hvdtrain.flight.stacks import DEBUGGER

# Ranks that are described one by one; the others are counted.
_SHOWN = 3
# States of ranks whose process has ended.
_LOST = ("ended", "left", "done")
_PHASE_TEXTS = {
    "": "",
    "script": "",
    "start": "its start",
    "input": "its input",
    "compute": "its compute",
    "callbacks": "a callback",
    "evaluation": "its evaluation",
    "saving": "saving",
    DEBUGGER: "a debugger",
}
_DEBUGGER_REMEDY = f" With {STALL_SHUTDOWN}=0 the others wait for the debugger."


def conclude(answers: Sequence[Answer]) -> str:
    """Return one line or more: which ranks are late for what, and where they are."""
    lost = [answer for answer in answers if answer.state in _LOST]
    alive = [answer for answer in answers if answer.state not in _LOST]
    lines = [_describe_lost(answer) for answer in lost[:_SHOWN]]
    if len(lost) > _SHOWN:
        lines.append(f"{len(lost) - _SHOWN} more ranks have ended.")
    if alive and all(map(_waits, alive)) and lost:
        groups = _by_text((a.member.rank, f"in {_in(a)}{_at(a)}") for a in alive)
        lines += [f"{ranks} {_verb(ranks)} for it {text}." for text, ranks in groups]
    elif alive:
        lines.append(_describe(alive))
    return "\n".join(lines)


def describe_cut(answer: Answer) -> str:
    """Return a line of a rank that is in a collective and cannot reach another host."""
    return (
        f"{_name(answer)} has been in {_in(answer)} for {answer.seconds:.0f} s"
        f"{_at(answer)}: its connection to another host is lost."
    )


def suspects(answers: Sequence[Answer]) -> list[Answer]:
    """Return the ranks that others wait for; all ranks if none or all are late."""
    late = [answer for answer in answers if not _waits(answer)]
    return late if late and len(late) < len(answers) else list(answers)


def first_difference(answers: Sequence[Answer]) -> str:
    """Return a line for the first collective that is not equal on all ranks."""
    by_rank = {
        answer.member.rank: {c.number: c for c in answer.collectives if c.number}
        for answer in answers
    }
    if len(by_rank) < 2 or not all(by_rank.values()):
        return "The records have no collectives of all ranks to compare."
    # Older records were overwritten on some of the ranks.
    first = max(min(records) for records in by_rank.values())
    last = min(max(records) for records in by_rank.values())
    for number in range(first, last + 1):
        texts = {
            rank: _record(records[number])
            for rank, records in by_rank.items()
            # A record that was being written is left out.
            if number in records
        }
        if len(set(texts.values())) > 1:
            groups = _by_text(texts.items())
            listed = "; ".join(f"{ranks}: {text}" for text, ranks in groups)
            return f"The records differ first in collective {number:,}. {listed}."
    ahead = [rank for rank, records in by_rank.items() if max(records) > last]
    # In a job that runs, the ranks are read at different times.
    is_over = any(answer.state in _LOST or _waits(answer) for answer in answers)
    if not ahead or not is_over:
        return f"The records of all ranks agree up to collective {last:,}."
    behind = _ranks(sorted(by_rank.keys() - set(ahead)))
    following = by_rank[ahead[0]][last + 1]
    return (
        f"The records of all ranks agree up to collective {last:,}. {behind} did not "
        f"enter {following} ({following.name}) yet, which {_ranks(ahead)} entered."
    )


def _record(record: Collective) -> str:
    # The ranks may send different numbers of rows.
    has_one_size = record.operation not in ("allgather", "alltoall")
    size = f" of {record.bytes:,} bytes" if record.bytes and has_one_size else ""
    return f"{record.operation} {record.name}{size}"


def _describe(answers: Sequence[Answer]) -> str:
    late = [answer for answer in answers if not _waits(answer)]
    waiting = [answer for answer in answers if _waits(answer)]
    if not late:
        return _describe_waiting(waiting)
    if not waiting:
        return _where_all_are(late)
    # The newest one, if they wait in several.
    awaited = max(waiting, key=lambda answer: (answer.number, answer.seconds))
    assert awaited.in_flight is not None
    step = f", step {awaited.step:,}" if awaited.step else ""
    name = awaited.in_flight.name
    # A rank may be stopped in the collective, or have just entered it.
    # Collectives of a process set have no number.
    number = awaited.in_flight.number
    has_entered = all(answer.number >= number > 0 for answer in late)
    verb = "complete" if has_entered else "enter"
    return (
        f"{_names(late)} did not {verb} {awaited.in_flight} ({name}{step}) for "
        f"{awaited.seconds:.0f} s. {_where(late)}; {_others(waiting, late)}."
        f"{_DEBUGGER_REMEDY if any(map(_is_in_debugger, late)) else ''}"
    )


def _is_in_debugger(answer: Answer) -> bool:
    return bool(answer.place and answer.place.phase == DEBUGGER)


def _describe_waiting(waiting: Sequence[Answer]) -> str:
    count = len(waiting)
    # A rank that has joined takes part in what the others call.
    waiting = [a for a in waiting if not _has_joined(a)] or waiting
    kinds = {(a.in_flight.name, a.in_flight.operation) for a in waiting if a.in_flight}
    seconds = min(answer.seconds for answer in waiting)
    if len(kinds) == 1 and count < waiting[0].member.size:
        return _describe_missing(waiting, seconds)
    if len(kinds) == 1:
        return (
            f"All {len(waiting)} ranks have been in {_in(waiting[0])} for "
            f"{seconds:.0f} s: none is late, and the communication does not complete."
        )
    groups = _by_text((a.member.rank, f"in {_in(a)}{_at(a)}") for a in waiting)
    listed = "; ".join(f"{ranks} {text}" for text, ranks in groups)
    if count < waiting[0].member.size:
        return f"For {seconds:.0f} s: {listed}. The other ranks are not visible here."
    return (
        f"Deadlock: for {seconds:.0f} s the ranks wait in different collectives, which "
        f"they call in different orders: {listed}."
    )


def _describe_missing(waiting: Sequence[Answer], seconds: float) -> str:
    ranks = sorted(answer.member.rank for answer in waiting)
    missing = _ranks(sorted(set(range(waiting[0].member.size)) - set(ranks)))
    verb = "are" if missing.startswith("ranks") else "is"
    has = "have" if len(ranks) > 1 else "has"
    return (
        f"{missing} {verb} late, on another host, or not started: "
        f"{_ranks(ranks)} {has} been in {_in(waiting[0])} for {seconds:.0f} s"
        f"{_at(waiting[0])}."
    )


def _where_all_are(answers: Sequence[Answer]) -> str:
    groups = _by_text((a.member.rank, _is_in(a)) for a in answers)
    return "; ".join(map(_sentence, groups)) + "."


def _where(late: Sequence[Answer]) -> str:
    if len(late) == 1:
        return f"It {_is_in(late[0])}"
    groups = _by_text((a.member.rank, _is_in(a)) for a in late)
    return f"R{'; '.join(map(_sentence, groups))[1:]}"


def _sentence(group: tuple[str, str]) -> str:
    text, ranks = group
    if ranks.startswith("ranks"):
        verbs = {"is": "are", "does": "do"}
        verb, _, rest = text.partition(" ")
        text = f"{verbs.get(verb, verb)} {rest}"
    return f"{ranks} {text}"


def _others(waiting: Sequence[Answer], late: Sequence[Answer]) -> str:
    count = "rank" if len(waiting) == 1 else f"{len(waiting)} ranks"
    verb = "waits" if len(waiting) == 1 else "wait"
    awaited = "it" if len(late) == 1 else "them"
    return f"the other {count} {verb} for {awaited}{_at(waiting[0])}"


def _is_in(answer: Answer) -> str:
    """Return what a rank does, in words that follow "rank 1"."""
    if answer.state == "stopped":
        return "is stopped, as by SIGSTOP"
    if answer.state == "silent":
        return (
            "does not respond: it is blocked in the kernel, handles SIGQUIT itself, or "
            "its guard has been killed"
        )
    place = answer.place
    # The phase that the stack shows is the code of the moment.
    phase = (place.phase if place else "") or answer.phase
    inside = _in(answer) if answer.in_flight else _PHASE_TEXTS.get(phase, phase)
    where = ", ".join(filter(None, (inside, str(place.frame) if place else "")))
    return f"is in {where}" if where else "is running; its stack has no Python frame"


def _describe_lost(answer: Answer) -> str:
    """Return why a process has ended, and what it did last."""
    text = f"{_name(answer)} {answer.cause}."
    if answer.state in ("left", "done"):
        return text
    inside = _in(answer) if answer.in_flight else _PHASE_TEXTS.get(answer.phase, "")
    step = f"step {answer.step:,}" if answer.step else ""
    place = str(answer.place.frame) if answer.place else ""
    if was := ", ".join(filter(None, (step, inside, place))):
        text += f" It was in {was}."
    if answer.number and not answer.in_flight:
        text += f" Its last collective was number {answer.number:,}."
    return text


def _verb(ranks: str) -> str:
    return "wait" if ranks.startswith("ranks") else "waits"


def _in(answer: Answer) -> str:
    assert answer.in_flight is not None
    return f"{answer.in_flight} ({answer.in_flight.name})"


def _at(answer: Answer) -> str:
    return f", {place.frame}" if (place := answer.place) else ""


def _has_joined(answer: Answer) -> bool:
    return answer.in_flight is not None and answer.in_flight.operation == "join"


def _waits(answer: Answer) -> bool:
    return answer.is_waiting and answer.state != "stopped"


def _name(answer: Answer) -> str:
    return f"rank {answer.member.rank} on {answer.member.host}"


def _names(answers: Sequence[Answer]) -> str:
    if len(answers) == 1:
        return _name(answers[0])
    return _ranks([answer.member.rank for answer in answers])


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:-1][:_SHOWN]))
    rest = len(ranks) - min(len(ranks) - 1, _SHOWN)
    return f"ranks {shown} and " + (f"{ranks[-1]}" if rest == 1 else f"{rest} more")


def _by_text(pairs: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Return each text with the ranks that it is of, by the first rank."""
    ordered = sorted(pairs, key=lambda pair: pair[1])
    groups = [
        (text, sorted(rank for rank, _ in group))
        for text, group in itertools.groupby(ordered, key=lambda pair: pair[1])
    ]
    groups.sort(key=lambda group: group[1])
    return [(text, _ranks(ranks)) for text, ranks in groups]


def stacks_text(answers: Sequence[Answer]) -> str:
    """Return the stacks of ranks, each below a line with rank, host and process."""
    blocks = [
        f"{_name(answer)}, process {answer.member.pid}: "
        f"{answer.cause or _is_in(answer)}\n{answer.stacks.rstrip()}\n"
        for answer in answers
        if answer.stacks
    ]
    return "\n".join(blocks)


def suspect_stack(answers: Sequence[Answer], *, asked: int) -> str:
    """Return the stack of a rank that others wait for.

    Args:
        asked: the rank whose stack is returned if none or all are late.
    """
    late = suspects(answers)
    if len(late) == len(answers):
        late = [answer for answer in answers if answer.member.rank == asked]
    return stacks_text(late[:1])
