"""Stops a job whose ranks no longer hold the same model."""

from collections.abc import Iterable

import keras
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.keras.callbacks.stopping import EverySteps
from hvdtrain.keras.consistency import check_model, check_trained
from hvdtrain.keras.variables import (
    find_optimizers,
    get_inner_optimizer,
    get_training_ranks,
    non_local_variables,
    variable_key,
)


class ConsistencyCheckCallback(keras.callbacks.Callback):
    """Checks that all ranks hold the same weights and optimizer state.

    A checksum (CRC-32) of the variables' bytes is compared over the ranks of the
    optimizer's `process_set`, and of a mesh along each of its axes: before the first
    step, after every `every_steps`, and at the end. Gradients that were not
    reduced, weights that were not broadcast, or a learning rate that was set on one
    rank only raise `DesynchronizedError`, with the same text on every rank. So do
    hyperparameters that differ, and in the first check what layers have learned from
    other samples on each rank, such as vocabularies. Variables that are registered with
    the optimizer as local are left out.

    The first check covers all weights if the optimizer has taken no step; it is
    skipped if `fit` still has to build the model on some rank. Other checks leave out
    weights that are not trainable, since the moving averages of `BatchNormalization`
    differ by rank. Another `fit` has a first check only if this callback is new on
    some rank, such as one that joined an elastic job later: one small reduction when
    training begins.

    Args:
        every_steps: training steps from one check to the next.
        local_variables: further variables that may differ by rank.
    """

    def __init__(
        self,
        every_steps: int = 1000,
        *,
        local_variables: Iterable[keras.Variable | tf.Variable] = (),
    ) -> None:
        super().__init__()
        self._interval = EverySteps(every_steps)
        self._is_due = False
        self._local_keys = {variable_key(variable) for variable in local_variables}
        self._has_started = False

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._interval.reset()
        self._is_due = False
        # A first check happens on all ranks or on none: it is a collective.
        self._has_started = self._is_true_on_all_ranks(
            self._has_started, "ConsistencyHasStarted"
        )

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        # The check is here, when all callbacks have handled the previous batch.
        if self._has_started:
            if self._is_due:
                self._check_trained(includes_learned=False)
        elif self._is_true_on_all_ranks(self.model.built, "ConsistencyIsBuilt"):
            # Not in on_train_begin, where callbacks later in the list restore or
            # broadcast.
            self._check_first()
        self._has_started = True
        self._is_due = False

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._is_due |= self._interval(batch)

    def on_train_end(self, logs: dict | None = None) -> None:
        self._check_trained(includes_learned=False)

    def _is_true_on_all_ranks(self, flag: bool, name: str) -> bool:
        process_set = get_training_ranks(self.model.optimizer)
        return bool(ops.is_true_on_all_ranks(flag, name=name, process_set=process_set))

    def _check_first(self) -> None:
        # After an earlier fit the moving averages differ, as in _check_trained.
        optimizers = map(get_inner_optimizer, find_optimizers(self.model))
        is_new = all(int(optimizer._iterations) == 0 for optimizer in optimizers)
        if self._is_true_on_all_ranks(is_new, "ConsistencyIsNew"):
            variables = non_local_variables(self.model, local_keys=self._local_keys)
            check_model(self.model, variables, local_keys=self._local_keys)
        else:
            self._check_trained(includes_learned=True)

    def _check_trained(self, *, includes_learned: bool) -> None:
        check_trained(
            self.model,
            local_keys=self._local_keys,
            includes_learned=includes_learned,
        )
