"""Stops a job whose ranks no longer hold the same model."""

from collections.abc import Iterable, Sequence, Set

import keras
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.keras.callbacks.fit_start import SharedCallback, joins
from hvdtrain.keras.callbacks.stopping import EverySteps
from hvdtrain.keras.consistency import CHECK_SETUP, check_consistency, trains_stages
from hvdtrain.keras.layers import made_untrained, undeclared_weights
from hvdtrain.keras.replication import (
    get_local_keys,
    get_process_set,
    get_training_ranks,
    non_local_variables,
    replicated_by_process_set,
)
from hvdtrain.keras.unlisted import find_unlisted
from hvdtrain.keras.variables import (
    Variable,
    find_optimizers,
    get_inner_optimizer,
    variable_key,
)


class ConsistencyCheckCallback(SharedCallback):
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
    the moving averages of `BatchNormalization`, and weights that are not trainable with
    `aggregation="mean"`. What a layer has in no variable, such as a hash table, is not
    compared. Another `fit` has a first check only if this callback is new on
    some rank, such as one that joined an elastic job later: one small reduction when
    training begins.

    Args:
        every_steps: training steps from one check to the next. With `JoinCallback`,
            whose ranks take unequal numbers of steps, there are the first check and
            the last alone.
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
        self._is_due |= self._interval(batch) and not joins(self)

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


def check_model(
    model: keras.Model,
    variables: Sequence[Variable],
    *,
    local_keys: Set[object] = frozenset(),
    remedy: str = CHECK_SETUP,
    includes_learned: bool = True,
    precedes_broadcast: bool = False,
) -> None:
    """Raise an error on every rank unless they hold the same model. A collective.

    Args:
        variables: variables of `model` and its optimizer; compared along each axis of
            a mesh as far as its ranks replicate them. Hyperparameters are always
            compared.
        local_keys: `variable_key`s of variables that may differ, beside those that are
            registered with the optimizers.
        remedy: for variables that differ.
        includes_learned: whether to compare what layers have learned from samples: to
            read 500,000 words takes seconds, and no step changes them.
        precedes_broadcast: as in `check_consistency`.

    Raises:
        DesynchronizedError: as in `check_consistency`.
    """
    axes = list(replicated_by_process_set(model.optimizer, variables))
    if not axes:
        return
    unlisted = find_unlisted(
        model if includes_learned else None,
        find_optimizers(model),
        local_keys | _all_local_keys(model),
    )
    for process_set, _, replicated in axes:
        has_stages = trains_stages(process_set, model.weights)
        check_consistency(
            replicated,
            () if has_stages else unlisted,
            process_set=process_set,
            remedy=remedy,
            precedes_broadcast=precedes_broadcast,
        )


def check_trained(
    model: keras.Model,
    *,
    local_keys: Set[object] = frozenset(),
    remedy: str = CHECK_SETUP,
    includes_learned: bool = True,
    includes_untrained: bool = True,
) -> None:
    """Call `check_model` with the variables that are equal in a training.

    Args:
        local_keys, remedy, includes_learned: as in `check_model`.
        includes_untrained: whether to compare `undeclared_weights`.
    """
    local_keys = local_keys | _all_local_keys(model)
    process_set = get_process_set(model.optimizer)
    checked = (
        undeclared_weights(model, process_set, local_keys) if includes_untrained else ()
    )
    # Weights of frozen layers are compared.
    untrained = made_untrained(model).keys() - {variable_key(v) for v in checked}
    excluded = local_keys | untrained
    variables = non_local_variables(model, local_keys=excluded)
    check_model(
        model,
        variables,
        local_keys=local_keys,
        remedy=remedy,
        includes_learned=includes_learned,
    )


def _all_local_keys(model: keras.Model) -> Set[object]:
    return frozenset().union(*map(get_local_keys, find_optimizers(model)))
