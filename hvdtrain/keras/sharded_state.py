"""Optimizer state that is sharded over the ranks (ZeRO stage 1).

Rajbhandari et al. (2020, arXiv:1910.02054): ranks that hold replicas of the weights
need the optimizer's state only once between them. Each rank keeps the slots of some of
the weights, updates these weights, and the ranks exchange them.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.collectives import graph
from hvdtrain.collectives.objects import allgather_object
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    is_elastic,
    needs_communication,
)
from hvdtrain.keras.consistency import (
    BROADCAST_FIRST,
    DesynchronizedError,
    compute_checksum,
)
from hvdtrain.keras.gradients import GradientReducer, Gradients
from hvdtrain.keras.seams import replace
from hvdtrain.keras.sharded_updates import WeightShard, gather, shard_weights
from hvdtrain.keras.variables import (
    Optimizer,
    accumulated_gradients,
    slots_by_index,
    variable_key,
    weight_copies,
)
from hvdtrain.sharding.shards import assign_shard


class _SlotsOrigin(NamedTuple):
    """The origin of a rank's slots before the first step."""

    # The process set over which the slots are sharded.
    ranks: tuple[int, ...]
    # Number of steps that the optimizer has taken.
    step: int
    # Checksum of the weights that slots are copies of; None without such slots.
    origin: int | None
    # Whether the weights still have this checksum.
    is_current: bool


class ShardedState:
    """Shards the state of an optimizer over the ranks of a process set.

    Keras builds the optimizer with an empty variable in place of each weight that
    another rank updates. The other steps of its `apply` handle full weights:
    accumulation, clipping and constraints. The methods that convert between the two are
    replaced on the instance.

    With N ranks, P elements of weights and S slots for each element (Adam 2, with
    `use_ema` 3), the state of a rank has about S * P / N elements instead of S * P.
    Accumulated gradients are not sharded: P. In a step, a rank sends about
    3 * P * (N - 1) / N elements, in an allreduce of gradients and an allgather of
    weights, instead of 2 * P * (N - 1) / N.

    One rank has all of a variable, so one has at least the slots of the largest one.
    The largest are dealt out first, each to the rank with the fewest elements. The
    weights are bitwise equal to weights trained with replicated state, for every
    optimizer.

    Args:
        optimizer: not a `LossScaleOptimizer`.

    Raises:
        ValueError: in an elastic job.
    """

    def __init__(self, optimizer: Optimizer, reducer: GradientReducer) -> None:
        self._optimizer, self._reducer = optimizer, reducer
        _check_fixed_ranks()
        # By `variable_key` of the weight, in the order of the weights.
        self._shards: dict[object, WeightShard] = {}
        self._weight_by_id: dict[int, keras.Variable] = {}
        self._originals: dict[str, Callable[..., Any]] = {}
        self._origin: int | None = None
        methods: dict[str, Callable[..., Any]] = {
            "build": self._build,
            "add_variable_from_reference": self._add_slot,
            "_apply_weight_decay": self._apply_weight_decay,
            "_backend_update_step": self._update,
            "_update_model_variables_moving_average": self._average,
            "_overwrite_model_variables_with_average_value": self._overwrite,
        }
        for name, method in methods.items():
            self._originals[name] = replace(optimizer, name, method, by=ShardedState)

    def rebuild(self) -> None:
        """Shard the state of an optimizer that is built, and keep its values.

        A model that was loaded from a file has such an optimizer.
        """
        optimizer = self._optimizer
        weights = list(optimizer._trainable_variables)
        values = [variable.numpy() for variable in optimizer.variables]
        kept = (optimizer._iterations, optimizer._learning_rate)
        for variable in optimizer.variables:
            if not any(variable is other for other in kept):
                optimizer._untrack_variable(variable)
        optimizer._trainable_variables_indices.clear()
        optimizer.built = False
        with keras.name_scope(optimizer.name):
            optimizer.build(weights)
        for variable, value in zip(optimizer.variables, values, strict=True):
            assign_shard(variable, value)

    def agree_on_start(self, root: int, all_ranks: ProcessSet) -> bool:
        """Return whether `copy_weights` is due after the broadcast. A collective.

        Args:
            root: the rank of the reducer's process set whose weights are broadcast.
            all_ranks: all ranks of the model, with every shard and stage.

        Raises:
            ValueError: on all ranks, if their shards of the state do not belong
                together or to the weights of the root.
        """
        starts = self._gather_starts(all_ranks)
        _check_same_step(starts)
        if not _have_different_copies(starts):
            return False
        index = list(self._reducer.process_set.ranks).index(root)
        if not all(group[index].is_current for group in _group_by_ranks(starts)):
            raise ValueError(
                f"The slots of {type(self._optimizer).__name__} start as copies of the "
                "weights, and each rank has its shards of them. Received: weights of "
                f"rank {root} that were assigned after its optimizer was built, and "
                "optimizers that were built with different weights. Assign the weights "
                "before optimizer.build, or seed the ranks alike."
            )
        return True

    def copy_weights(self) -> None:
        """Assign the weights to the slots that start as copies of them."""
        slots = weight_copies(self._optimizer)
        for slot, shard in zip(slots, self._shards.values(), strict=True):
            if shard.sharding and shard.size:
                slot.assign(shard.weight)
        self._origin = self._checksum()

    def check_start(self, all_ranks: ProcessSet) -> None:
        """Raise a DesynchronizedError unless slots start from equal weights.

        A collective of `all_ranks`, as in `agree_on_start`; the error is on all ranks.
        """
        if _have_different_copies(self._gather_starts(all_ranks)):
            raise DesynchronizedError(
                f"The slots of {type(self._optimizer).__name__} start as copies of the "
                "weights, and the ranks have built their shards of them from different "
                f"ones. {BROADCAST_FIRST}"
            )

    def _gather_starts(self, all_ranks: ProcessSet) -> list[_SlotsOrigin]:
        process_set = self._reducer.process_set
        if not needs_communication(process_set):
            return []
        start = _SlotsOrigin(
            ranks=tuple(process_set.ranks),
            step=int(self._optimizer._iterations),
            origin=self._origin,
            is_current=self._origin is None or self._checksum() == self._origin,
        )
        # Gather what each rank checks: an error on some ranks would block the others.
        return allgather_object(start, name="ShardedStart", process_set=all_ranks)

    def _checksum(self) -> int:
        weights = [shard.weight for shard in self._shards.values() if shard.sharding]
        return compute_checksum(weights)

    def reduce(self, gradients: Gradients, weights: list[keras.Variable]) -> Gradients:
        """Return the combined gradients. A collective, like the `GradientReducer`."""
        reduced = self._reducer(gradients, weights)
        for shard, gradient in zip(self._get_shards(weights), reduced, strict=True):
            # This rank uses no element of the gradient. If it uses none of a bucket,
            # the reduction would be pruned here, and the other ranks would block in it.
            if gradient is not None and not shard.size:
                graph.prevent_pruning(gradient)
        return reduced

    def _get_shards(self, weights: Iterable[keras.Variable]) -> list[WeightShard]:
        return [self._shards[variable_key(weight)] for weight in weights]

    def _build(self, weights: Iterable[keras.Variable]) -> None:
        # The first `apply` may call it inside of a function that is being traced.
        weights = list(weights)
        shards = shard_weights(weights, self._reducer)
        self._shards = {variable_key(shard.weight): shard for shard in shards}
        self._weight_by_id = {id(shard.variable): shard.weight for shard in shards}
        optimizer = self._optimizer
        # Keras excludes weights by key or by name, and a shard has the name of its
        # weight. It may decide when it builds the optimizer.
        excluded: set[object] = getattr(optimizer, "_exclude_from_weight_decay", set())
        for shard in shards:
            if optimizer._var_key(shard.weight) in excluded:
                excluded.add(optimizer._var_key(shard.variable))
        self._originals["build"]([shard.variable for shard in shards])
        # An assignment of the attribute would track the weights as the optimizer's own
        # variables.
        vars(optimizer)["_trainable_variables"] = weights
        for i, weight in enumerate(weights):
            optimizer._trainable_variables_indices[optimizer._var_key(weight)] = i
        full = {id(variable) for variable in accumulated_gradients(optimizer)}
        sharded = {id(variable) for variable in optimizer.variables} - full
        for kind, slot, shard in slots_by_index(optimizer, shards):
            if id(slot) in sharded:
                shard.set_slot_sharding(slot, kind)
        if weight_copies(optimizer):
            with tf.init_scope():
                self._origin = self._checksum()

    def _add_slot(
        self,
        reference_variable: keras.Variable,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> keras.Variable:
        if name == "gradient_accumulator":
            # Each rank adds up its own full gradients, before they are reduced.
            reference_variable = self._weight_by_id[id(reference_variable)]
        return self._originals["add_variable_from_reference"](
            reference_variable, name=name, initializer=initializer
        )

    def _apply_weight_decay(self, weights: Iterable[keras.Variable]) -> None:
        # Keras calls it before each update, also without weight decay.
        shards = self._get_shards(weights)
        self._originals["_apply_weight_decay"](
            [shard.variable for shard in shards if shard.size]
        )

    def _update(
        self,
        gradients: Gradients,
        weights: list[keras.Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        shards = self._get_shards(weights)
        indices = [i for i, shard in enumerate(shards) if shard.size]
        # Called even without shards on this rank: Nadam updates a variable of its own.
        self._originals["_backend_update_step"](
            [gradients[i] for i in indices],
            [shards[i].variable for i in indices],
            learning_rate,
        )
        gather(shards, [shard.variable for shard in shards], weights)

    def _average(self, weights: Iterable[keras.Variable]) -> None:
        variables = [shard.variable for shard in self._get_shards(weights)]
        self._originals["_update_model_variables_moving_average"](variables)

    def _overwrite(self, weights: list[keras.Variable]) -> None:
        # Like Keras, match the averages to the weights by their order.
        shards = self._get_shards(self._optimizer._trainable_variables)
        averages = self._optimizer._model_variables_moving_average
        gather(shards, averages, weights)


def _check_fixed_ranks() -> None:
    if is_elastic():
        raise ValueError(
            "shard_state shards the optimizer's state over a fixed number of "
            "ranks, and the number of ranks of an elastic job changes. Use "
            "shard_state=False."
        )


def _check_same_step(starts: list[_SlotsOrigin]) -> None:
    steps = [start.step for start in starts]
    if len(set(steps)) > 1:
        raise ValueError(
            "The optimizer's state is sharded over the ranks, and only some of them "
            "have loaded their shards. Received: an optimizer that has taken "
            f"{', '.join(map(str, steps))} steps on successive ranks. Load the model "
            "on all ranks, or use shard_state=False."
        )


def _group_by_ranks(starts: list[_SlotsOrigin]) -> list[list[_SlotsOrigin]]:
    groups: dict[tuple[int, ...], list[_SlotsOrigin]] = {}
    for start in starts:
        groups.setdefault(start.ranks, []).append(start)
    return list(groups.values())


def _have_different_copies(starts: list[_SlotsOrigin]) -> bool:
    return any(
        not group[0].step and len({start.origin for start in group}) > 1
        for group in _group_by_ranks(starts)
    )
