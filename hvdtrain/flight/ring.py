"""The last collectives and phases of a rank, read from the file that it maps.

native/recorder.h has the same layout. A rank overwrites its oldest record: a record
whose sequence number changes while it is read is left out.
"""

import dataclasses
import functools
import itertools
import os
import struct
from collections.abc import Iterator

from hvdtrain.open_directory import open_regular

# The first one is code outside of the others, as in a script that calls `hvd.init`.
PHASES = (
    *("script", "start", "input", "compute", "callbacks"),
    *("evaluation", "saving"),
)
RECORDS, HEADER_BYTES, RECORD_BYTES = 1024, 4096, 128
FORMAT = 0x6876647400000001
_COLLECTIVE = 2
# Of the header's fields: the first one with the nanoseconds in collectives, by phase.
_IN_COLLECTIVES = 17
_HEADER = struct.Struct("<QQQQqQqQq8Q8QQ")
_RECORD = struct.Struct("<QqqQQQII48s24s")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a rank.

    Attributes:
        number: among the collectives of all ranks, from 1; 0 for a process set.
        bytes: of the tensors; 0 if the shapes were not known in the graph.
        entered: in seconds of the host's monotonic clock.
        left: the same; 0 while the rank is in it.
    """

    number: int
    name: str
    operation: str
    bytes: int
    step: int
    entered: float
    left: float

    def __str__(self) -> str:
        return f"{self.operation} {self.number:,}" if self.number else self.operation


@dataclasses.dataclass(frozen=True)
class Ring:
    """A rank's records.

    Attributes:
        phase: the present one, of `PHASES`.
        phase_entered: in seconds of the host's monotonic clock.
        step: the step that the rank takes, from 1; 0 where nothing counts steps.
        number: of the last collective of all ranks that it has entered.
        fits: trainings by Keras' `fit` that it has ended.
        collectives: the last ones, the oldest first.
        in_flight: the collective that it is in.
    """

    phase: str
    phase_entered: float
    step: int
    step_entered: float
    number: int
    fits: int
    collectives: tuple[Collective, ...]
    in_flight: Collective | None


@dataclasses.dataclass(frozen=True)
class Moment:
    """What changes in a ring as long as its rank makes progress.

    Attributes:
        entered: when it entered the collective that it is in; None if it is in none.
        waited: seconds in complete collectives of the present phase.
    """

    phase: str
    phase_entered: float
    step: int
    step_entered: float
    entered: float | None
    waited: float = 0.0


def read(path: str | os.PathLike) -> Ring | None:
    """Return the ring in a file; None if the file has no complete ring."""
    data = _bytes(path, HEADER_BYTES + RECORDS * RECORD_BYTES)
    if data is None:
        return None
    fields = _HEADER.unpack_from(data)
    # A record that was overwritten while the file was read has another sequence now.
    again = _bytes(path, HEADER_BYTES + RECORDS * RECORD_BYTES) or data
    kept = sorted(
        record
        for record, later in zip(_records(data), _records(again), strict=True)
        if record[0] == later[0] > 0
    )
    return Ring(
        phase=PHASES[fields[7]],
        phase_entered=fields[8] * 1e-9,
        step=fields[5],
        step_entered=fields[6] * 1e-9,
        number=fields[2],
        fits=fields[25],
        collectives=_since_reset([_collective(r) for r in kept if r[6] == _COLLECTIVE]),
        in_flight=next((_collective(r) for r in kept if r[0] == fields[3]), None),
    )


def _records(data: bytes) -> Iterator[tuple]:
    return _RECORD.iter_unpack(data[HEADER_BYTES:])


def _since_reset(collectives: list[Collective]) -> tuple[Collective, ...]:
    """Return those since the ranks began to count from 1 again."""
    first = 0
    for index, (before, after) in enumerate(itertools.pairwise(collectives), 1):
        if 0 < after.number <= before.number:
            first = index
    return tuple(collectives[first:])


def read_moment(path: str | os.PathLike) -> Moment | None:
    """Return the `Moment` of a ring, which costs less than all of its records."""
    data = _bytes(path, HEADER_BYTES)
    if data is None:
        return None
    fields = _HEADER.unpack_from(data)
    return Moment(
        phase=PHASES[fields[7]],
        phase_entered=fields[8] * 1e-9,
        step=fields[5],
        step_entered=fields[6] * 1e-9,
        entered=fields[4] * 1e-9 if fields[3] > 0 else None,
        waited=fields[_IN_COLLECTIVES + fields[7]] * 1e-9,
    )


def _bytes(path: str | os.PathLike, count: int) -> bytes | None:
    try:
        # The file must be of this user: its name can be guessed before it is made.
        opener = functools.partial(open_regular, owner=os.geteuid())
        with open(path, "rb", opener=opener) as file:
            data = file.read(count)
    except OSError:
        return None
    is_complete = len(data) == count
    return data if is_complete and _HEADER.unpack_from(data)[0] == FORMAT else None


def _collective(record: tuple) -> Collective:
    _, entered, left, step, number, size, _, _, name, operation = record
    return Collective(
        number=number,
        name=_text(name),
        operation=_text(operation),
        bytes=size,
        step=step,
        entered=entered * 1e-9,
        left=left * 1e-9,
    )


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode(errors="replace")
