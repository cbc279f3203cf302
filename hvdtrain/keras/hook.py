"""The hook by which an optimizer's gradients are reduced inside Keras' own step."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.dtypes import local_shard, map_values, mark_internal
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    global_process_set,
    needs_communication,
)
from hvdtrain.keras.calls import calling_loss_scale_optimizer, calling_model
from hvdtrain.keras.clipping import Clipping
from hvdtrain.keras.consistency import (
    check_first_step,
    is_checked,
    trains_stages,
)
from hvdtrain.keras.gradients import (
    Gradient,
    GradientReducer,
    sum_duplicate_rows,
)
from hvdtrain.keras.seams import replace
from hvdtrain.keras.sharded_state import ShardedState
from hvdtrain.keras.unlisted import Unlisted, find_unlisted
from hvdtrain.keras.variables import (
    Optimizer,
    Variable,
    non_local_state,
    optimizers_inside,
    shard_slots,
)
from hvdtrain.keras.weight_decay import WeightDecay
from hvdtrain.native import recorder
from hvdtrain.sharding.optimizer_checks import check_elementwise, check_takes_shards
from hvdtrain.sharding.shards import has_summed_gradients, is_replicated

if TYPE_CHECKING:
    # parallel imports this package.
    from hvdtrain.parallel.mesh import Mesh


def check_loss_scale(shared: Optimizer | None) -> None:
    """Raise a ValueError if the calling `LossScaleOptimizer` checks one rank alone.

    `shared` is the one whose check spans all ranks.
    """
    caller = calling_loss_scale_optimizer()
    if caller is None or caller is shared:
        return
    raise ValueError(
        "The distributed optimizer is inside a LossScaleOptimizer that checks for "
        "overflow on each rank alone: ranks without overflow would wait for one "
        "that skips the step. Add "
        "hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks, make "
        "an hvd.elastic.KerasState of the model after compile(), or use "
        "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
    )


def share_overflow(loss_scale_optimizer: Optimizer, ranks: ProcessSet) -> None:
    """Make all `ranks` skip a step when one of them overflows."""

    def check_finite(grads: Sequence[Gradient | None]) -> tf.Tensor:
        return ops.is_true_on_all_ranks(
            check_locally(grads), name="LossScaleOverflow", process_set=ranks
        )

    check_locally = replace(
        loss_scale_optimizer, "check_finite", check_finite, by=share_overflow
    )


class UpdateSkipping:
    """Skips updates of optimizers whose gradients are not finite.

    The rest of Keras' `apply` runs: it resets the accumulated gradients, and counts the
    iteration. The methods by which it changes weights, slots and moving averages are
    replaced on the instance.

    Attributes:
        count: number of skipped updates. It is not a variable of the optimizer, so that
            a saved model loads without this package.
    """

    def __init__(self) -> None:
        self.count = mark_internal(tf.Variable(0, trainable=False, dtype=tf.int64))
        self._count_before: tf.Tensor | None = None
        self._optimizers: list[Optimizer] = []

    def add(self, optimizer: Optimizer) -> None:
        """Skip updates of `optimizer`, which is no wrapper of other optimizers."""
        if any(optimizer is added for added in self._optimizers):
            return
        self._optimizers.append(optimizer)
        is_averaged = functools.partial(self._is_averaged, optimizer)
        self._replace(optimizer, "_apply_weight_decay", self._is_kept)
        self._replace(optimizer, "_backend_update_step", self._is_kept)
        self._replace(optimizer, "_update_model_variables_moving_average", is_averaged)

    def begin(self) -> None:
        """Read the count. Call it before Keras' `apply`."""
        self._count_before = self.count.read_value()

    def skip_unless(self, is_finite: tf.Tensor) -> None:
        """Skip the update that follows if `is_finite`, a scalar, is false."""
        self.count.assign_add(tf.cast(tf.logical_not(is_finite), tf.int64))

    def _replace(
        self, optimizer: Optimizer, name: str, is_due: Callable[[], tf.Tensor]
    ) -> None:
        def method_if_due(*args: Any) -> None:
            # Safe in `tf.cond`, also with the collective of `ShardedState` inside: the
            # predicate is equal on all ranks.
            tf.cond(is_due(), lambda: method(*args), lambda: None)

        method = replace(optimizer, name, method_if_due, by=UpdateSkipping)

    def _is_kept(self) -> tf.Tensor:
        # Compare the variable, not a tensor of `skip_unless`: Keras completes a window
        # in a branch of the graph, whose tensors cannot be read outside of it.
        return tf.equal(self.count, self._count_before)

    def _is_averaged(self, optimizer: Optimizer) -> tf.Tensor:
        # In the first iteration, Keras initializes the moving averages.
        is_first = tf.equal(tf.convert_to_tensor(optimizer.iterations), 0)
        return tf.logical_or(self._is_kept(), is_first)


def all_finite(gradients: Iterable[Gradient]) -> tf.Tensor:
    """Return whether all values of all gradients are finite, as a scalar tensor."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])


class ReductionHook:
    """Reduces an optimizer's gradients between accumulation and clipping.

    `apply` of Keras calls `_clip_gradients` with the gradients of a complete
    accumulation window, also where nothing is to be clipped. The hook replaces these
    two methods, `build` and `finalize_variable_values` of one optimizer, and is its
    attribute `reduction_hook`.

    Args:
        optimizer: not a `LossScaleOptimizer`.
        window_factor: number by which the mean over a window is multiplied.
        mesh: the ranks over which the model is sharded.

    Attributes:
        is_configured: whether the compiled model has been adapted to the optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reducer: GradientReducer,
        *,
        window_factor: int,
        mesh: "Mesh | None" = None,
        sharded_state: ShardedState | None = None,
    ) -> None:
        self._optimizer = optimizer
        self.reducer = reducer
        self._window_factor = window_factor
        self.mesh = mesh
        self.sharded_state = sharded_state
        self._weight = 1.0
        # Of the step that is being traced; the indices of variables with a gradient.
        self._variables: list[Variable] = []
        self._indices: list[int] = []
        self._has_reduced = False
        self._loss_scale_optimizer: Optimizer | None = None
        self._is_first_step = True
        self._skipping: UpdateSkipping | None = None
        self.is_configured = False
        # Before `_clip_gradients` is replaced, whose original it calls.
        self._clip = Clipping(optimizer, reducer, mesh=mesh)
        replace_method = functools.partial(replace, optimizer, by=ReductionHook)
        self._build = replace_method("build", self.build)
        if optimizer.built:
            shard_slots(optimizer, optimizer._trainable_variables)
        self._apply = replace_method("apply", self.apply)
        replace_method("_clip_gradients", self.clip_gradients)
        self._decay = WeightDecay(optimizer)
        # Ends no `fit` for the flight recorder: evaluations call it, too.
        self._finalize = replace_method("finalize_variable_values", self.end_fit)
        optimizer.reduction_hook = self

    @property
    def all_ranks(self) -> ProcessSet:
        """The ranks that train."""
        return global_process_set if self.mesh else self.reducer.process_set

    @property
    def has_shared_replicas(self) -> bool:
        """Whether several ranks compute one replica of the model, layer by layer."""
        return self.mesh is not None and self.mesh.model.size > 1

    def axes(self, root_rank: int | None = None) -> list[tuple[ProcessSet, int]]:
        """Return process sets that replicate variables, and the root rank in each.

        The roots have the same values as `root_rank`, which is by default the first.
        """
        if not self.mesh:
            ranks = self.reducer.process_set
            return [(ranks, ranks.ranks[0] if root_rank is None else root_rank)]
        position = self.mesh.shape.coordinates(root_rank or 0)
        # The axis data is last: `BroadcastGlobalVariablesCallback` takes it by index.
        axes = (self.mesh.model, self.mesh.pipeline, self.mesh.data)
        return [(a.process_set, a.process_set.ranks[position[a.name]]) for a in axes]

    def weigh_gradients(self, weight: float) -> None:
        """Multiply the gradients of this rank by `weight` before they are reduced.

        With the mean over ranks, the weight samples * ranks / samples of all ranks
        gives the mean over samples where ranks have different numbers of them. Where
        the backward pass has summed the gradient of a variable over the ranks, only the
        weight 1 is possible.
        """
        self._weight = weight

    def skip_nonfinite(self) -> tf.Variable:
        """Skip, on all ranks, updates whose gradients are not all finite.

        Call it before the first step is traced. Returns the variable that counts these
        updates. It does not count the steps that a `LossScaleOptimizer` skips.
        """
        self._skipping = self._skipping or UpdateSkipping()
        self._skip_updates()
        return self._skipping.count

    def _skip_updates(self) -> None:
        assert self._skipping
        for optimizer in optimizers_inside(self._optimizer):
            self._skipping.add(optimizer)

    def build(self, variables: list[keras.Variable]) -> None:
        # Slots and updates of fully sharded weights are those of the shards.
        shards = list(map(local_shard, variables))
        self._build(shards)
        shard_slots(self._optimizer, shards)

    def apply(
        self,
        grads: Iterable[Gradient | None],
        trainable_variables: Iterable[Variable] | None = None,
    ) -> None:
        # AutoGraph converts this method, since it has to convert an `apply` of a user's
        # own class.
        arguments = self._prepare(grads, trainable_variables)
        if arguments:
            self._apply(*arguments)
            self._check_reduced()

    @do_not_convert
    def _prepare(
        self,
        grads: Iterable[Gradient | None],
        trainable_variables: Iterable[Variable] | None,
    ) -> tuple[list[Gradient | None], list[Variable] | None] | None:
        """Return the arguments of Keras' `apply`, or None without gradients."""
        # Either argument may be an iterator, which can be read only once.
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(map(local_shard, trainable_variables))
        if not grads:
            return None
        if trainable_variables is None and not self._optimizer.built:
            # Keras raises the error, and the optimizer can be built afterwards.
            self._apply(grads)
        check_loss_scale(self._loss_scale_optimizer)
        variables = trainable_variables or list(self._optimizer._trainable_variables)
        _check_not_overwritten(grads, variables)
        check_elementwise(self._optimizer, variables)
        check_takes_shards(self._optimizer, self._optimizer._trainable_variables)
        self.reducer.check(variables, [process_set for process_set, _ in self.axes()])
        self._clip.check()
        if self._weight != 1 and has_summed_gradients(variables):
            raise ValueError(
                "Gradients of tables that are sharded over the data ranks are sums "
                "over ranks, and cannot be weighted by rank. Received: the weight "
                f"{self._weight}. Use equal batch sizes on all ranks."
            )
        self._check_first_step(variables)
        # Keras removes gradients that are None before it clips.
        self._indices = [i for i, gradient in enumerate(grads) if gradient is not None]
        self._variables = variables
        self._has_reduced = False
        if self._skipping:
            self._skipping.begin()
        return grads, trainable_variables

    def clip_gradients(self, grads: list[Gradient]) -> list[Gradient]:
        """Combine `grads` over the ranks, then clip them as the optimizer does."""
        self._has_reduced = True
        factor = self._window_factor * self._weight
        if factor != 1:
            grads = [map_values(lambda v: v * factor, gradient) for gradient in grads]
        gradients: list[Gradient | None] = [None] * len(self._variables)
        for i, gradient in zip(self._indices, grads, strict=True):
            gradients[i] = gradient
        reduce = self.sharded_state.reduce if self.sharded_state else self.reducer
        summed = sum_duplicate_rows(reduce(gradients, self._variables), self._variables)
        reduced = [summed[i] for i in self._indices]
        variables = [self._variables[i] for i in self._indices]
        clipped = self._clip(reduced, variables)
        self._decay.follow(clipped, variables)
        if self._skipping:
            # Check both: clipping makes infinity finite, and large gradients NaN.
            self._skipping.skip_unless(self._all_finite([*reduced, *clipped]))
        return clipped

    def _all_finite(self, gradients: Iterable[Gradient]) -> tf.Tensor:
        finite = all_finite(gradients)
        # Reduced gradients are equal on all ranks, but for gradients of shards and of
        # local variables. A rank that skipped a step alone would block the others.
        if self.mesh or self.reducer.differ_by_rank(self._variables):
            finite = ops.is_true_on_all_ranks(
                finite, name="FiniteGradients", process_set=self.all_ranks
            )
        return finite

    def finalize(self, var_list: Iterable[Variable]) -> None:
        """Assign the moving averages to the weights, where the optimizer has them."""
        self._finalize(list(map(local_shard, var_list)))

    def end_fit(self, var_list: Iterable[Variable]) -> None:
        """Record the end of a `fit`, which other ranks may still wait in."""
        self.finalize(var_list)
        # Not all ranks take part in the training of a smaller process set.
        if self.all_ranks.process_set_id == 0:
            recorder.end_fit()

    def share_finite_check(self, loss_scale_optimizer: Optimizer) -> None:
        """Make all ranks skip a step when one of them overflows."""
        if self._loss_scale_optimizer is loss_scale_optimizer:
            return
        # Compiling again puts a new LossScaleOptimizer around the same optimizer.
        self._loss_scale_optimizer = loss_scale_optimizer
        share_overflow(loss_scale_optimizer, self.all_ranks)

    def _check_first_step(self, variables: list[Variable]) -> None:
        # A retrace does not check again: not all ranks may retrace.
        if not self._is_first_step or not is_checked():
            return
        if not self._optimizer.built:
            # Keras' `apply` would build it after the check. But slots are compared
            # too, and other ranks may have built theirs before.
            with keras.name_scope(self._optimizer.name, caller=self._optimizer):
                self._optimizer.build(variables)
        weights = [v for v in variables if not self.reducer.is_local(v)]
        state = non_local_state(self._optimizer, variables, self.reducer.local_keys)
        unlisted: list[Unlisted] = []
        if any(needs_communication(process_set) for process_set, _ in self.axes()):
            model, local_keys = calling_model(self._optimizer), self.reducer.local_keys
            with tf.init_scope():
                unlisted = find_unlisted(model, [self._optimizer], local_keys)
        for process_set, _ in self.axes():
            replicated = [v for v in weights + state if is_replicated(v, process_set)]
            has_stages = trains_stages(process_set, variables)
            check_first_step(
                replicated, () if has_stages else unlisted, process_set=process_set
            )
        if self.sharded_state:
            with tf.init_scope():
                self.sharded_state.check_start(self.all_ranks)
        self._is_first_step = False

    @do_not_convert
    def _check_reduced(self) -> None:
        # Training without a reduction raises no error and gives wrong results, so it
        # is checked whatever a custom optimizer or a later Keras overrides.
        between_updates = (
            tf.executing_eagerly() and self._optimizer.gradient_accumulation_steps
        )
        if not self._has_reduced and not between_updates:
            raise RuntimeError(
                f"The optimizer {type(self._optimizer).__name__} applied gradients "
                "that were not reduced over the ranks: it does not call Keras' own "
                f"_clip_gradients. Keras version: {keras.__version__}. Use "
                "hvd.DistributedGradientTape with the plain optimizer instead."
            )


def _check_not_overwritten(
    grads: list[Gradient | None], variables: list[Variable]
) -> None:
    # Not strict: Keras raises its own error for lists of different lengths.
    updated = [v for g, v in zip(grads, variables, strict=False) if g is not None]
    if any(getattr(variable, "overwrite_with_gradient", False) for variable in updated):
        raise NotImplementedError(
            "float8 training overwrites variables with their gradients, which cannot "
            "be reduced over ranks. Use float32, mixed_bfloat16 or mixed_float16."
        )
