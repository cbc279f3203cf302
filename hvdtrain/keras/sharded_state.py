"""Optimizer state that is divided over the ranks (ZeRO stage 1).

Rajbhandari et al. (2020, arXiv:1910.02054): ranks that hold copies of the weights need
one copy of the optimizer's state together. Each rank keeps the slots of its part of the
weights, updates this part, and the ranks exchange the parts.
"""

from typing import NamedTuple

import keras
import tensorflow as tf

from hvdtrain.collectives import graph, transport
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
from hvdtrain.keras.gradients import split_into_groups
from hvdtrain.keras.seams import replace
from hvdtrain.keras.sharded_updates import divide, gather, scatter
from hvdtrain.keras.variables import (
    accumulated_gradients,
    slots_by_index,
    variable_key,
    weight_copies,
)
from hvdtrain.sharding.shards import (
    NOT_ELEMENTWISE,
    assign_shard,
    get_sharding,
    set_sharding,
)

BY_VARIABLE, BY_SLICES = "variables", "slices"
BY_SCATTERED_SLICES = "slices_reducescatter"
# Adafactor keeps means over the last axis and over the one before it.
_FACTORS = {"_r": lambda shape: shape[:-1], "_c": lambda shape: shape[:-2] + shape[-1:]}
_CHOICES = (BY_VARIABLE, BY_SLICES, BY_SCATTERED_SLICES)


class _Start(NamedTuple):
    """What a rank's slots are before the first step.

    Attributes:
        ranks: those that have the other parts of the slots.
        step: number of steps that the optimizer has taken.
        origin: checksum of the weights that slots are copies of; None without such
            slots.
        is_current: whether the weights are still those.
    """

    ranks: tuple
    step: int
    origin: int | None
    is_current: bool


class ShardedState:
    """Divides the state of an optimizer over the ranks of a process set.

    Keras builds the optimizer with this rank's parts of the weights in place of the
    weights, and updates these parts; all else of its `apply` handles whole weights:
    accumulation, clipping and constraints. The methods between are replaced on the
    instance.

    With N ranks, P elements of weights and S slots for each element (Adam 2, with
    `use_ema` 3), the state of a rank has S * P / N elements instead of S * P.
    Accumulated gradients stay whole: P. What a rank sends in a step, through rings:

        division                 exchange                     elements sent
        none                     allreduce                    2 * P * (N - 1) / N
        "variables", "slices"    allreduce, allgather         3 * P * (N - 1) / N
        "slices_reducescatter"   reducescatter, allgather     2 * P * (N - 1) / N

    - "variables": whole variables, the largest first to the rank with the fewest
      elements. Bitwise equal to the undivided state, for every optimizer. A rank has
      at least the largest variable.
    - "slices": equal slices of the concatenation of the variables of each group that is
      reduced together. A rank keeps a copy of its slices, P / N elements. Bitwise
      equal, for elementwise optimizers. Sparse gradients become dense ones, as with
      `sparse_as_dense`.
    - "slices_reducescatter": the same slices. Equal up to the order of sums, since
      Horovod's reducescatter adds in another one than its allreduce (not on two ranks,
      nor in shared memory), and norms that clip are sums over ranks.

    Args:
        optimizer: a Keras optimizer, not a `LossScaleOptimizer`.
        reducer: a `GradientReducer`.
        division: a value of `shard_state` of `DistributedOptimizer`.

    Raises:
        ValueError: for another value, or an optimizer that cannot be divided so.
    """

    def __init__(self, optimizer, reducer, division):
        self._optimizer, self._reducer = optimizer, reducer
        self._division = BY_VARIABLE if division is True else division
        self._check()
        self._shards = {}
        self._weight_of = {}
        self._originals = {}
        self._origin = None
        for name, method in {
            "build": self._build,
            "add_variable_from_reference": self._add_slot,
            "_apply_weight_decay": self._apply_weight_decay,
            "_backend_update_step": self._update,
            "_update_model_variables_moving_average": self._average,
            "_overwrite_model_variables_with_average_value": self._overwrite,
        }.items():
            self._originals[name] = replace(optimizer, name, method, by=ShardedState)

    @property
    def is_scattered(self):
        """Whether gradients are reduced to this rank's parts of them."""
        is_shared = needs_communication(self._reducer.process_set)
        return is_shared and self._division == BY_SCATTERED_SLICES

    def rebuild(self):
        """Divides the state of an optimizer that was built with all of it.

        Its values are those that a file held, for example.
        """
        optimizer = self._optimizer
        weights = list(optimizer._trainable_variables)
        values = [variable.numpy() for variable in optimizer.variables]
        kept = (optimizer._iterations, optimizer._learning_rate)
        for variable in optimizer.variables:
            if not any(variable is each for each in kept):
                optimizer._untrack_variable(variable)
        optimizer._trainable_variables_indices.clear()
        optimizer.built = False
        with keras.name_scope(optimizer.name):
            optimizer.build(weights)
        for variable, value in zip(optimizer.variables, values, strict=True):
            assign_shard(variable, value)

    def agree_on_start(self, root: int, all_ranks: ProcessSet) -> bool:
        """Returns whether `copy_weights` is due after the broadcast. A collective.

        Args:
            root: the rank of the reducer's process set whose weights are broadcast.
            all_ranks: the ranks that train, with all parts of the model.

        Raises:
            ValueError: on all ranks, if their parts of the state do not belong together
                or to the weights of the root.
        """
        starts = self._gather_starts(all_ranks)
        _check_same_step(starts)
        if not _have_different_copies(starts):
            return False
        place = list(self._reducer.process_set.ranks).index(root)
        if not all(group[place].is_current for group in _grouped(starts)):
            raise ValueError(
                f"The slots of {type(self._optimizer).__name__} start as copies of the "
                "weights, and each rank has its part of them. Received: weights of "
                f"rank {root} that were assigned after its optimizer was built, and "
                "optimizers that were built with different weights. Assign the weights "
                "before optimizer.build, or seed the ranks alike."
            )
        return True

    def copy_weights(self) -> None:
        """Assigns the weights to the slots that start as copies of them."""
        slots = weight_copies(self._optimizer)
        for slot, shard in zip(slots, self._shards.values(), strict=True):
            if shard.sharding and shard.size:
                slot.assign(shard.current())
        self._origin = self._checksum()

    def check_start(self, all_ranks: ProcessSet) -> None:
        """Raises an error unless the slots start from equal weights. A collective.

        Args:
            all_ranks: as in `agree_on_start`.

        Raises:
            DesynchronizedError: on all ranks.
        """
        if _have_different_copies(self._gather_starts(all_ranks)):
            raise DesynchronizedError(
                f"The slots of {type(self._optimizer).__name__} start as copies of the "
                "weights, and the ranks have built their parts of them from different "
                f"ones. {BROADCAST_FIRST}"
            )

    def _gather_starts(self, all_ranks: ProcessSet) -> list[_Start]:
        process_set = self._reducer.process_set
        if not needs_communication(process_set):
            return []
        start = _Start(
            ranks=tuple(process_set.ranks),
            step=int(self._optimizer._iterations),
            origin=self._origin,
            is_current=self._origin is None or self._checksum() == self._origin,
        )
        # An error on some ranks alone would block the others.
        return allgather_object(start, name="ShardedStart", process_set=all_ranks)

    def _checksum(self):
        weights = [shard.weight for shard in self._shards.values() if shard.sharding]
        return compute_checksum(weights)

    def reduce(self, gradients, weights):
        """Returns the combined gradients, of which this rank may have only its parts.

        Args:
            gradients: list of tensors, `tf.IndexedSlices` or None.
            weights: list of the variables that they belong to.
        """
        reduce = self._scatter if self.is_scattered else self._reducer
        reduced = reduce(gradients, weights)
        for shard, gradient in zip(self._shards_of(weights), reduced, strict=True):
            # This rank uses no element of it: if that is so for all of a bucket, its
            # reduction would be pruned here, and the other ranks would block in it.
            if gradient is not None and not shard.size:
                graph.prevent_pruning(gradient)
        return reduced

    def _scatter(self, gradients: list, weights: list) -> list:
        shards = self._shards_of(weights)
        combined = self._reducer.scale_local(gradients, weights)
        divided = [
            i
            for i, shard in enumerate(shards)
            if gradients[i] is not None and shard.sharding
        ]
        # Gradients of the last layers are computed first.
        for group in reversed(
            split_into_groups(divided, weights, self._reducer.options.groups)
        ):
            parts = scatter(
                [shards[i] for i in group],
                [gradients[i] for i in group],
                self._reducer.options.reduction,
                name=f"{self._reducer.name}_shards",
            )
            for i, part in zip(group, parts, strict=True):
                combined[i] = part
        return combined

    def sum_squares(self, squares, weights):
        """Returns the squared norms of gradients from those of this rank's parts.

        For a global norm, also those of the local weights of all ranks, but for slices
        of divided ones, whose squares are added up with those of their other slices.
        """
        is_added = [
            bool(shard.sharding)
            or bool(self._optimizer.global_clipnorm and not get_sharding(shard.weight))
            for shard in self._shards_of(weights)
        ]
        sums = transport.combine(
            tf.stack(squares), self._reducer.process_set, name="ShardNorms"
        )
        return list(tf.unstack(tf.where(is_added, sums, tf.stack(squares))))

    def _shards_of(self, weights):
        return [self._shards[variable_key(weight)] for weight in weights]

    def _check(self):
        if self._division not in _CHOICES:
            raise ValueError(
                "shard_state must be False, True or one of "
                f"{', '.join(map(repr, _CHOICES))}. Received: {self._division!r}"
            )
        is_divisible = not isinstance(self._optimizer, NOT_ELEMENTWISE)
        if self._division != BY_VARIABLE and not is_divisible:
            raise ValueError(
                f"{type(self._optimizer).__name__} computes the update of an element "
                f"from its whole variable: shard_state={self._division!r} would change "
                "it. Use shard_state=True, which divides the state by variable."
            )
        if is_elastic():
            raise ValueError(
                "shard_state divides the optimizer's state over a fixed number of "
                "ranks, and the number of ranks of an elastic job changes. Use "
                "shard_state=False."
            )

    def _build(self, weights):
        # Also inside of a function that is being traced, by the first `apply`.
        weights = list(weights)
        shards = divide(
            weights, self._reducer, is_by_variable=self._division == BY_VARIABLE
        )
        self._shards = {variable_key(each.weight): each for each in shards}
        self._weight_of = {id(each.variable): each.weight for each in shards}
        optimizer = self._optimizer
        self._originals["build"]([shard.variable for shard in shards])
        # An assignment would make the weights the optimizer's own variables.
        vars(optimizer)["_trainable_variables"] = weights
        for i, weight in enumerate(weights):
            optimizer._trainable_variables_indices[optimizer._var_key(weight)] = i
        self._use_decay_of_weights(shards)
        self._set_shardings(shards)
        if weight_copies(optimizer):
            with tf.init_scope():
                self._origin = self._checksum()

    def _add_slot(self, reference_variable, name=None, initializer="zeros"):
        if name == "gradient_accumulator":
            # Each rank adds up its own gradients, before they are reduced.
            reference_variable = self._weight_of[id(reference_variable)]
        return self._originals["add_variable_from_reference"](
            reference_variable, name=name, initializer=initializer
        )

    def _use_decay_of_weights(self, shards):
        # Keras looks up exclusions by variable, and keeps the answers.
        optimizer = self._optimizer
        for shard in shards:
            answer = optimizer._use_weight_decay(shard.weight.value)
            key = optimizer._var_key(shard.variable)
            optimizer._exclude_from_weight_decay_cache[key] = answer

    def _set_shardings(self, shards):
        optimizer = self._optimizer
        whole = {id(each) for each in accumulated_gradients(optimizer)}
        own = {id(variable) for variable in optimizer.variables} - whole
        for name, slot, shard in slots_by_index(optimizer, shards):
            if id(slot) in own and shard.sharding is not None:
                _set_sharding(slot, shard, name)

    def _apply_weight_decay(self, weights):
        # Keras calls it before each update, also without weight decay.
        shards = [shard for shard in self._shards_of(weights) if shard.size]
        for shard in shards:
            shard.refresh()
        self._originals["_apply_weight_decay"]([shard.variable for shard in shards])

    def _update(self, gradients, weights, learning_rate):
        shards = self._shards_of(weights)
        if not self.is_scattered:
            pairs = zip(shards, gradients, strict=True)
            gradients = [shard.of(g) if shard.size else None for shard, g in pairs]
        mine = [i for i, shard in enumerate(shards) if shard.size]
        # Also without parts of this rank: Nadam updates a variable of its own.
        self._originals["_backend_update_step"](
            [gradients[i] for i in mine],
            [shards[i].variable for i in mine],
            learning_rate,
        )
        gather(shards, [shard.variable for shard in shards], weights)

    def _average(self, weights):
        parts = [shard.current() for shard in self._shards_of(weights)]
        self._originals["_update_model_variables_moving_average"](parts)

    def _overwrite(self, weights):
        # As Keras, by the places of the weights.
        shards = self._shards_of(self._optimizer._trainable_variables)
        averages = self._optimizer._model_variables_moving_average
        gather(shards, averages, weights)


def _check_same_step(starts: list[_Start]) -> None:
    steps = [start.step for start in starts]
    if len(set(steps)) > 1:
        raise ValueError(
            "The optimizer's state is divided over the ranks, and only some of them "
            "have loaded their part. Received: an optimizer that has taken "
            f"{', '.join(map(str, steps))} steps on successive ranks. Load the model "
            "on all ranks, or use shard_state=False."
        )


def _grouped(starts: list[_Start]) -> list[list[_Start]]:
    """Returns them in groups of ranks with the parts of the same slots."""
    groups = {}
    for start in starts:
        groups.setdefault(start.ranks, []).append(start)
    return list(groups.values())


def _have_different_copies(starts: list[_Start]) -> bool:
    return any(
        not group[0].step and len({start.origin for start in group}) > 1
        for group in _grouped(starts)
    )


def _set_sharding(slot, shard, kind):
    shape = shard.sharding.shape
    if kind in _FACTORS:
        if len(shape) > 1:
            set_sharding(slot, shard.factor_sharding(_FACTORS[kind](shape)))
    elif slot.shape == shard.variable.shape:
        set_sharding(slot, shard.sharding)
    elif len(slot.shape):
        raise ValueError(
            f"shard_state cannot divide {slot.path}: a slot has the shape of its "
            f"variable, or is a scalar. Received: {tuple(slot.shape)} for {shape}."
        )
