"""A counter of training steps for callbacks that act periodically."""


class EverySteps:
    """Returns True once in `every_steps` training steps.

    Counts across epochs, and several steps per call with `steps_per_execution`. Equal
    calls have equal results on every rank, so that collectives may depend on them.
    """

    def __init__(self, every_steps):
        if not isinstance(every_steps, int) or every_steps < 1:
            raise ValueError(
                f"every_steps must be a positive integer. Received: {every_steps!r}"
            )
        self._every_steps = every_steps
        self.reset()

    def reset(self):
        """Sets the count to zero, when training begins.

        Otherwise ranks that joined an elastic job later would have another count.
        """
        self._last_batch = -1
        self._steps = 0

    def __call__(self, batch):
        """Counts the steps up to `batch`: the last one done, from 0 in each epoch."""
        is_new_epoch = batch <= self._last_batch
        self._steps += batch + 1 if is_new_epoch else batch - self._last_batch
        self._last_batch = batch
        if self._steps < self._every_steps:
            return False
        self._steps = 0
        return True
