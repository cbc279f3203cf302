"""Learning rates as functions of the training step, with momentum correction.

After Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1
Hour" (arXiv:1706.02677), sections 2.2 and 3, and Horovod's callbacks.
"""

import math
from collections.abc import Callable

import horovod.tensorflow as hvd
import keras
from keras.src.utils import io_utils

from hvdtrain.keras.learning_rates import set_learning_rate, warmup_factor
from hvdtrain.keras.replication import get_hook


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)`.

    The rate depends on the epoch and the batch alone: a run that is resumed with
    `initial_epoch=e` has the rates of the uninterrupted run. Outside of
    `start_epoch <= epoch < end_epoch` the callback does nothing.

    Args:
        multiplier: a function of the epoch, or a number m for the exponential
            decay `m ** (epoch - start_epoch)`.
        end_epoch: the epoch after its last; None for no end.
        staircase: True calls `multiplier` once an epoch, with an integer. False
            calls it for every batch, with `epoch + batch / steps_per_epoch`. With
            `steps_per_execution=k` it is called once in k steps, and the rate belongs
            to the first of them.
        momentum_correction: keep the momentum of SGD and RMSprop in proportion to
            the learning rate: see `learning_rates.set_learning_rate`.
        steps_per_epoch: by default the number in `fit`. Needed for a data set of
            unknown length when `staircase` is False.

    Raises:
        ValueError: if `initial_lr` is missing; in `fit`, if the number of steps is
            needed and unknown, or the optimizer's learning rate is a schedule.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: float = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr must be a learning rate. Received: None")
        if not callable(multiplier):
            base = multiplier
            multiplier = lambda epoch: base ** (epoch - start_epoch)  # noqa: E731
        self.initial_lr = initial_lr
        self.multiplier = multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._takes_steps_of_fit = not staircase and not steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        _check_adjustable(self.model.optimizer)
        # In every fit: the next one may have other data.
        if self._takes_steps_of_fit:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__} needs the number of steps per epoch. "
                    "Received: a data set of unknown length. Pass steps_per_epoch=... "
                    "to the callback."
                )

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        epoch: float = self._epoch
        if not self.staircase:
            assert self.steps_per_epoch  # Known since on_train_begin.
            epoch += batch / self.steps_per_epoch
        if epoch < self.start_epoch:
            return
        if self.end_epoch is not None and epoch >= self.end_epoch:
            return
        if self.staircase and batch > 0:
            return
        set_learning_rate(
            self.model.optimizer,
            self.initial_lr * self.multiplier(epoch),
            momentum_correction=self.momentum_correction,
        )

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate.numpy())


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / hvd.size()` to `initial_lr`.

    In step s of W warm-up steps, counted from 1, the rate is
    `initial_lr * (1 + (size - 1) * s / W) / size`: linear, and exactly `initial_lr`
    in the last. Size is `hvd.size()`, and on a `parallel.Mesh` the number of replicas.
    Afterwards the callback does not change the rate. With `steps_per_execution=k` the
    warm-up is a staircase: k steps share the rate of their last one.

    Args:
        initial_lr: learning rate after the warm-up, already scaled to the ranks. By
            default the optimizer's when the first `fit` begins; give the number if
            training may resume in the middle of the warm-up.
        warmup_epochs: length of the warm-up; may be a fraction, such as
            `warmup_steps / steps_per_epoch`.
        momentum_correction, steps_per_epoch: as in `LearningRateScheduleCallback`.
        verbose: 1 makes rank 0 print a line at the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            # Replaced in on_train_begin if it is missing.
            math.nan if initial_lr is None else initial_lr,
            self._warmup,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_train_begin(self, logs: dict | None = None) -> None:
        super().on_train_begin(logs)
        if math.isnan(self.initial_lr):
            self.initial_lr = float(self.model.optimizer.learning_rate.numpy())

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        assert self.end_epoch is not None
        is_last = epoch == math.ceil(self.end_epoch) - 1
        if is_last and self.verbose > 0 and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate.numpy())
            # Like Keras' own callbacks with verbose=1: absl if print is disabled.
            io_utils.print_msg(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to "
                f"{rate:g}."
            )

    def _warmup(self, epoch: float) -> float:
        # At the end of the execution: so the last execution reaches 1 for any number
        # of steps per execution. An execution ends with its epoch.
        steps = self.params.get("steps_per_execution")  # In `train_and_evaluate`.
        steps = steps or getattr(self.model, "steps_per_execution", 1) or 1
        assert self.steps_per_epoch
        assert self.end_epoch
        end = min(epoch + steps / self.steps_per_epoch, math.floor(epoch) + 1)
        hook = get_hook(self.model.optimizer)
        # On a mesh, learning rates are scaled to the replicas.
        size = hook.mesh.data.size if hook and hook.mesh else hvd.size()
        return warmup_factor(end / self.end_epoch, size=size)


def _check_adjustable(optimizer: keras.optimizers.Optimizer) -> None:
    if not isinstance(optimizer.learning_rate, keras.Variable):
        raise ValueError(
            "No callback can change a learning rate that is a function or a "
            f"LearningRateSchedule. Received: {optimizer._learning_rate!r}. Create the "
            "optimizer with a number."
        )
