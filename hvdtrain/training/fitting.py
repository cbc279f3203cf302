"""Keras' `fit`, from any step on."""

import re
import warnings

import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.job import JobError
from hvdtrain.job.world import SharedJobError
from hvdtrain.keras.learning_rates import without_loss_scale
from hvdtrain.keras.optimizer import is_distributed

# The error of `assert_cardinality`.
_EARLY_END = re.compile(r"expected to contain \d+ elements? but contained only (\d+)")


class _SegmentEndError(Exception):
    """Leaves `fit` at the end of an epoch, without what it does at the end."""


def built(model, train_spec):
    """Return a model that has all variables, with a distributed optimizer.

    Args:
        model: a compiled model.
        train_spec: the `TrainSpec`.

    Raises:
        JobError: it is not compiled, or the first batch has another size.
    """
    if not getattr(model, "compiled", False):
        raise JobError(
            f"Received {type(model).__name__} from model_fn; expected a compiled Keras "
            "model: call its compile()."
        )
    if not is_distributed(model.optimizer):
        hvd.DistributedOptimizer(model.optimizer)
    # Keras builds the metrics of `compile` with the first batch: a checkpoint that was
    # written within an epoch has states for them.
    step = train_spec.scale_from.step if train_spec.scale_from else 0
    for batch in train_spec.batches(step, step + 1).take(1):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        break
    else:
        raise JobError("Received no batch from input_fn; expected one for each step.")
    size = keras.tree.flatten(x)[0].shape[0]
    if size != train_spec.local_batch_size:
        raise JobError(
            f"Received a batch of {size} samples from input_fn; expected "
            f"local_batch_size={train_spec.local_batch_size}, by which the ranks are "
            "weighted."
        )
    predictions = model(x)
    # With several losses, Keras builds a metric for each here.
    model.compute_loss(x, y, predictions, weights)
    model.compute_metrics(x, y, predictions, weights)
    model.reset_metrics()
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model, make_batches, plan, *, start_step, callbacks):
    """Train from `start_step` to the end of the plan.

    A run that continues within an epoch takes two calls of Keras' `fit`: all epochs of
    one call have the same number of steps. The callbacks see one training, in which
    batches are numbered as if it had not been interrupted.

    Args:
        model: a compiled model.
        make_batches: `TrainSpec.batches`.
        plan: the `Plan`.
        start_step: steps taken before.
        callbacks: Keras callbacks.

    Raises:
        JobError: the ranks hold different weights, or the input has ended early.
    """
    segments = plan.segments(start_step)
    whole = _WholeTraining(callbacks, model=model, plan=plan)
    for segment in segments:
        whole.start(segment, is_last=segment is segments[-1])
        batches = make_batches(segment.start_step, segment.end_step)
        try:
            _fit(model, batches, segment, whole)
            # The last segment, or a callback has stopped the training.
            return
        except _SegmentEndError:
            continue
        except hvd.callbacks.DesynchronizedError as error:
            raise SharedJobError(str(error)) from None
        except tf.errors.OpError as error:
            if found := _EARLY_END.search(str(error)):
                raise JobError(
                    f"Received {found[1]} batches from input_fn for the steps "
                    f"{segment.start_step} to {segment.end_step}; expected one for "
                    "each step: set TrainSpec.repeat, or lower max_steps."
                ) from None
            raise


def _fit(model, batches, segment, callbacks):
    # Keras needs the cardinality, which a dataset after `flat_map` does not have.
    steps = segment.end_step - segment.start_step
    # Without `take`, one batch more than asserted would be read, and be an error.
    batches = batches.take(steps)
    batches = batches.apply(tf.data.experimental.assert_cardinality(steps))
    with warnings.catch_warnings():
        # The plan makes the last epoch shorter than the others.
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        model.fit(
            batches,
            initial_epoch=segment.first_epoch,
            epochs=segment.end_epoch,
            steps_per_epoch=segment.epoch_steps,
            callbacks=callbacks,
            shuffle=False,
            verbose=0,
        )


class _WholeTraining(keras.callbacks.CallbackList):
    """Callbacks that see one training in several calls of `fit`.

    Args:
        callbacks: Keras callbacks.
        model: the compiled model.
        plan: the `Plan`.
    """

    def __init__(self, callbacks, *, model, plan):
        super().__init__(
            callbacks,
            add_history=True,
            model=model,
            verbose=0,
            epochs=plan.epochs,
            steps=plan.fit_epoch_steps,
        )
        self._plan = plan
        self._has_begun = False

    def start(self, segment, *, is_last):
        """Take the segment of the next call of `fit`."""
        self._is_last = is_last
        self._offset = segment.start_step % self._plan.fit_epoch_steps

    def on_train_begin(self, logs=None):
        if not self._has_begun:
            self._has_begun = True
            super().on_train_begin(logs)

    def on_epoch_begin(self, epoch, logs=None):
        # An interrupted epoch has begun before: a callback that changes the learning
        # rate there, `LearningRateScheduler` for example, would do so twice.
        rate = without_loss_scale(self.model.optimizer).learning_rate
        is_kept = self._offset and isinstance(rate, keras.Variable)
        before = rate.numpy() if is_kept else None
        self._epoch = epoch
        super().on_epoch_begin(epoch, logs)
        if is_kept:
            rate.assign(before)

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch + self._offset, logs)

    def on_train_batch_end(self, batch, logs=None):
        # The last execution of the last epoch may have fewer steps.
        steps = self._plan.step(self._epoch + 1) - self._plan.step(self._epoch)
        batch = min(batch + self._offset, steps - 1)
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self._offset = 0
        if not self._is_last and not self.model.stop_training:
            # At its end, fit would replace the weights by their moving averages.
            raise _SegmentEndError
