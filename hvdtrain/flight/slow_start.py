"""What a job waits for that has not taken a step after ten seconds."""

import time

from hvdtrain.flight import ring

_SECONDS = 10.0


class SlowStart:
    """Describes once that `hvd.init`, and once that the start of a training, is slow.

    Over a slow network each collective takes seconds, and none reaches a stall limit.
    """

    def __init__(self) -> None:
        self._described: set[str] = set()
        # Seconds in collectives before this start: of earlier trainings.
        self._waited_before = 0.0

    def line(self, path: str, moment: ring.Moment) -> str:
        """Return a line about the rank of a ring, empty unless its start is slow."""
        seconds = time.monotonic() - moment.entered if moment.entered else 0.0
        if moment.phase == "start":
            seconds += moment.waited - self._waited_before
        else:
            self._waited_before = moment.waited
        if seconds < _SECONDS or len(self._described) == 2:
            return ""
        records = ring.read(path)
        current = records.in_flight if records else None
        kind = current.operation if current else ""
        if moment.phase == "start":
            kind = "start"
        if kind not in ("init", "start") or kind in self._described:
            return ""
        self._described.add(kind)
        if kind == "init":
            return (
                f"hvd.init has taken {seconds:.0f} s: another rank has not called it, "
                "or the network between hosts is slow.\n"
            )
        place = f", now in {current} ({current.name})" if current else ""
        return (
            f"The start of the training has waited for {seconds:.0f} s in collectives"
            f"{place}: another rank is slow, or the network between hosts is.\n"
        )
