"""Counts training steps for callbacks that act once in so many of them."""


class EverySteps:
    """Says when another `every_steps` training steps have passed.

    Counts over epochs, and when Keras reports several steps at once
    (`steps_per_execution`). The same calls give the same answers on every rank.
    """

    def __init__(self, every_steps):
        if not isinstance(every_steps, int) or every_steps < 1:
            raise ValueError(
                f"every_steps must be a positive integer. Received: {every_steps!r}"
            )
        self._every_steps = every_steps
        self.reset()

    def reset(self):
        """Starts counting anew, when training begins.

        Of the ranks of an elastic job some have trained before, and some have not.
        """
        self._last_batch = -1
        self._steps = 0

    def __call__(self, batch):
        """Counts the steps up to `batch`, the last one done, from 0 on in its epoch."""
        is_new_epoch = batch <= self._last_batch
        self._steps += batch + 1 if is_new_epoch else batch - self._last_batch
        self._last_batch = batch
        if self._steps < self._every_steps:
            return False
        self._steps = 0
        return True
