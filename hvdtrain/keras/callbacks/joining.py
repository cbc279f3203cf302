"""Ranks with unequal numbers of batches."""

from collections.abc import Sequence
from typing import ClassVar

import keras
import numpy as np

from hvdtrain.collectives import ops
from hvdtrain.collectives.process_sets import global_process_set, needs_communication
from hvdtrain.collectives.transport import Average
from hvdtrain.keras.callbacks.effects import callbacks_beside
from hvdtrain.keras.callbacks.fit_start import SharedCallback, misplaced
from hvdtrain.keras.layers import normalizes_over_ranks
from hvdtrain.keras.replication import get_hook, get_local_keys, non_local_variables
from hvdtrain.keras.variables import find_optimizers, get_inner_optimizer
from hvdtrain.sharding.shards import is_split_over_ranks


class JoinCallback(SharedCallback):
    """Lets a rank without further batches wait for the others, epoch by epoch.

    The ranks that still have batches continue, and their gradients are averaged over
    themselves (Horovod's `join` alone divides by all ranks). At the end, every rank
    receives the weights and the state of the optimizers from the rank that has taken
    the most steps. This happens before validation, and at the end of an epoch without
    one. The optimizers are the compiled one, and distributed ones that are attributes
    of the model.

    With gradient accumulation, an update is the mean over the batches that took part:
    the last batches of a rank are left out if the other ranks complete their window
    without it. A window that is still open at the end of an epoch continues in the
    next one.

    Put it before callbacks that call collectives at the end of an epoch: another order
    is refused at the start. While a rank waits, the others may only reduce dense
    tensors over all ranks: use `sparse_as_dense=True` with embeddings, no bfloat16
    compression, no process sets, no layers that normalize over ranks, and callbacks
    that call collectives between epochs only.

    Raises:
        ValueError: in `fit`, for callbacks before it that belong after it.

    Source: `join` and its cost are Horovod's; see `horovod.tensorflow.join`.
    """

    joins: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._is_training = False

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if is_split_over_ranks(model.variables):
            raise ValueError(
                "JoinCallback cannot be used with a model that is sharded over ranks: "
                "the forward pass of the others needs the rank that waits. Deal "
                "equally many batches to every rank instead."
            )
        exchanges = any(map(normalizes_over_ranks, model._flatten_layers()))
        if exchanges and needs_communication(global_process_set):
            raise ValueError(
                "JoinCallback cannot be used with layers that normalize over ranks: "
                "the forward pass of the others needs the rank that waits. Deal "
                "equally many batches to every rank, or use BatchNormalization()."
            )
        hooks = map(get_hook, find_optimizers(model))
        if any(hook and hook.sharded_state for hook in hooks):
            raise ValueError(
                "JoinCallback cannot be used with shard_state: a rank that waits does "
                "not update its shards of the weights. Deal equally many batches to "
                "every rank instead."
            )

    def on_train_begin(self, logs: dict | None = None) -> None:
        # Lists without BroadcastGlobalVariablesCallback, which checks others.
        fault = misplaced(callbacks_beside(self))
        if fault and needs_communication(global_process_set):
            raise ValueError(fault)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._is_training = True

    def on_test_begin(self, logs: dict | None = None) -> None:
        # Before `fit` validates: validation needs equal weights on all ranks.
        self._join()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._join()

    def _join(self) -> None:
        # Once in an epoch: other ranks may validate, or not.
        if not self._is_training:
            return
        self._is_training = False
        if not needs_communication(global_process_set):
            return
        last_rank = int(ops.join())
        optimizers = find_optimizers(self.model)
        if not optimizers:
            ops.broadcast_variables(non_local_variables(self.model), last_rank)
            return
        # Between two updates of an accumulating optimizer no rank blocks, so the last
        # one to join need not be the one with the most batches.
        steps = ops.allgather([_count_steps(optimizers)], name="JoinSteps").numpy()
        root = int(steps.sum(axis=1).argmax())
        for column, optimizer in zip(steps.T, optimizers, strict=True):
            _align_window(optimizer, column, root)
        ops.broadcast_variables(_non_local_variables(self.model, optimizers), root)


def _count_steps(optimizers: Sequence[keras.optimizers.Optimizer]) -> list[int]:
    # The property `iterations` is the number of updates, not of batches.
    return [int(get_inner_optimizer(o)._iterations) for o in optimizers]


def _non_local_variables(
    model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer]
) -> list[keras.Variable]:
    # A variable that is local to one optimizer is unknown to the others.
    local_keys = frozenset().union(*map(get_local_keys, optimizers))
    variables = {
        id(variable): variable
        for optimizer in optimizers
        for variable in non_local_variables(
            model, optimizer=optimizer, local_keys=local_keys
        )
    }
    return list(variables.values())


def _align_window(
    optimizer: keras.optimizers.Optimizer, steps: np.ndarray, root: int
) -> None:
    """Scale accumulated gradients to the number of steps that all ranks take over.

    Keras divides the accumulated gradients of each rank by the length of the window,
    and the ranks' results are averaged. A rank that has accumulated fewer batches would
    count as much as the others, and one that kept gradients of an older window would
    count more. Hence every rank's sum is multiplied by (open steps x ranks / batches of
    all ranks in the open window).

    Args:
        steps: the steps that each rank has taken.
        root: the rank whose steps all ranks take over.
    """
    hook, base = get_hook(optimizer), get_inner_optimizer(optimizer)
    window = base.gradient_accumulation_steps
    if hook is None or not window or not base.built:
        return
    open_steps = steps[root] % window
    batches = (steps - (steps[root] - open_steps)).clip(min=0)
    factor = 0.0
    if batches[hook.reducer.process_set.rank()] > 0:
        factor = 1.0
        # A sum has no divisor: batches that are missing add nothing.
        if hook.reducer.options.reduction.op == Average:
            factor = float(open_steps * len(steps) / batches.sum())
    for accumulated in base._accumulated_gradients:
        accumulated.assign(accumulated * factor)
