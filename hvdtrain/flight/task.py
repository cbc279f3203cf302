"""What a rank passes to its guard at its start."""

import dataclasses
import json

from hvdtrain.flight.answer import Member
from hvdtrain.flight.limits import Limits


@dataclasses.dataclass(frozen=True)
class Task:
    """The rank, how its guard reads its stacks, and its limits.

    Attributes:
        directory: shared by the guards of this host.
        stacks: file descriptor from which the guard reads what `faulthandler` writes.
        thread: of the rank, which receives SIGQUIT from the guard.
        reason: file descriptor to which the guard writes why it ends the job, if any.
    """

    member: Member
    directory: str
    stacks: int
    thread: int
    limits: Limits
    reason: int | None = None

    def as_text(self) -> str:
        """Return the task as JSON; see `from_text`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Task":
        values = json.loads(text)
        member, limits = Member(**values["member"]), Limits(**values["limits"])
        return cls(**values | {"member": member, "limits": limits})
