"""Time that is counted within epochs."""


class Stopwatch:
    """Counts the seconds of a clock within epochs.

    Args:
        clock: returns seconds.

    Attributes:
        total: seconds in all epochs, as of the last `read`.
        reported: those at the last report.
    """

    def __init__(self, clock):
        self._clock = clock
        self.total = self.reported = 0.0

    def resume(self):
        """Leave out the time since the last `read`."""
        self._start = self._clock() - self.total

    def read(self):
        """Read the clock."""
        self.total = self._clock() - self._start
