"""The hook by which an optimizer's gradients are reduced inside Keras' own step."""

import functools
import inspect

import keras
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.keras.clipping import Clipping
from hvdtrain.keras.consistency import check_first_step
from hvdtrain.keras.gradients import map_values, sum_duplicate_rows
from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import (
    non_local_state,
    shard_slots,
)
from hvdtrain.sharding.shards import (
    check_elementwise,
    has_summed_gradients,
    is_replicated,
)


def check_loss_scale(shared):
    """Raises a ValueError unless the `LossScaleOptimizer` that calls is `shared`.

    Args:
        shared: the one whose check for overflow is one of all ranks; may be None.
    """
    caller = _calling_optimizer()
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


def share_overflow(loss_scale_optimizer, ranks):
    """Makes all `ranks` skip a step when one of them overflows."""

    def check_finite(grads):
        return ops.is_true_on_all_ranks(
            check_locally(grads), name="LossScaleOverflow", process_set=ranks
        )

    check_locally = replace(
        loss_scale_optimizer, "check_finite", check_finite, by=share_overflow
    )


def _calling_optimizer():
    """Returns the `LossScaleOptimizer` whose `apply` is on the stack, or None.

    The inner optimizer has no reference to it. In a graph it calls the inner `apply`
    in a branch for steps without overflow, as a user's own `tf.cond` may do rightly.
    """
    source = inspect.getsourcefile(keras.optimizers.LossScaleOptimizer)
    frame = inspect.currentframe()
    while frame := frame.f_back:
        if frame.f_code.co_filename == source and "self" in frame.f_locals:
            return frame.f_locals["self"]
    return None


class UpdateSkipping:
    """Leaves out updates of an optimizer whose gradients are not finite.

    Keras' `apply` goes on around them: it resets the accumulated gradients, and counts
    the iteration. The methods by which it changes weights, slots and moving averages
    are replaced on the instance.

    Args:
        optimizer: a Keras optimizer, not a `LossScaleOptimizer`.

    Attributes:
        count: a variable with the number of updates that were left out. It is none of
            the optimizer's: a saved model loads without this package.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.count = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._count_before = None
        self._replace("_apply_weight_decay", self._is_kept)
        self._replace("_backend_update_step", self._is_kept)
        self._replace("_update_model_variables_moving_average", self._is_averaged)

    def begin(self):
        """Is called before Keras' `apply`."""
        self._count_before = self.count.read_value()

    def note(self, is_finite):
        """Counts the update that follows if `is_finite`, a tensor, is false."""
        self.count.assign_add(tf.cast(tf.logical_not(is_finite), tf.int64))

    def _replace(self, name, is_due):
        def method_if_due(*args):
            # No collective is in it: whether it is due is equal on all ranks anyway.
            tf.cond(is_due(), lambda: method(*args), lambda: None)

        method = replace(self._optimizer, name, method_if_due, by=UpdateSkipping)

    def _is_kept(self):
        # From the variable, since Keras completes a window in a branch, whose tensors
        # cannot be read outside of it.
        return tf.equal(self.count, self._count_before)

    def _is_averaged(self):
        # In the first iteration, Keras gives the moving averages their first values.
        is_first = tf.equal(tf.convert_to_tensor(self._optimizer.iterations), 0)
        return tf.logical_or(self._is_kept(), is_first)


def all_finite(gradients):
    """Returns whether all values of a list of dense or sparse gradients are finite."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])


class ReductionHook:
    """Reduces an optimizer's gradients between accumulation and clipping.

    `apply` of Keras calls `_clip_gradients` with the gradients of a complete
    accumulation window, also where nothing is to be clipped. The hook replaces these
    two methods and `build` of one optimizer, and is its attribute `reduction_hook`.

    Args:
        optimizer: a Keras optimizer, not a `LossScaleOptimizer`.
        reducer: a `GradientReducer`.
        window_factor: number by which the mean over a window is multiplied.
        mesh: the `parallel.Mesh` over which the model is divided, or None.
        sharded_state: the `ShardedState` of the optimizer, or None.
    """

    def __init__(
        self, optimizer, reducer, *, window_factor, mesh=None, sharded_state=None
    ):
        self._optimizer = optimizer
        self.reducer = reducer
        self._window_factor = window_factor
        self.mesh = mesh
        self.sharded_state = sharded_state
        self._weight = 1.0
        self._variables, self._places = [], []
        self._has_reduced = False
        self._loss_scale_optimizer = None
        self._is_first_step = True
        self._skipping = None
        self.is_configured = False
        # Before `_clip_gradients` is replaced, whose original it calls.
        self._clip = Clipping(
            optimizer, reducer, mesh=mesh, sharded_state=sharded_state
        )
        replace_method = functools.partial(replace, optimizer, by=ReductionHook)
        self._build = replace_method("build", self.build)
        if optimizer.built:
            shard_slots(optimizer, optimizer._trainable_variables)
        self._apply = replace_method("apply", self.apply)
        replace_method("_clip_gradients", self.clip_gradients)
        optimizer.reduction_hook = self

    @property
    def all_ranks(self):
        """The ranks that train."""
        return global_process_set if self.mesh else self.reducer.process_set

    def axes(self, root_rank=None):
        """Process sets along which variables are copied, and the root in each.

        Args:
            root_rank: the rank whose values are meant; by default the first.
        """
        if not self.mesh:
            ranks = self.reducer.process_set
            return [(ranks, ranks.ranks[0] if root_rank is None else root_rank)]
        place = self.mesh.shape.coordinates(root_rank or 0)
        axes = (self.mesh.model, self.mesh.pipeline, self.mesh.data)
        return [(a.process_set, a.process_set.ranks[place[a.name]]) for a in axes]

    def weigh_gradients(self, weight):
        """Multiplies the gradients of this rank before they are reduced.

        With the mean over ranks, the weight samples * ranks / samples of all ranks
        gives the mean over samples where ranks have different numbers of them. A
        variable whose gradient is the sum over ranks already admits no other than 1.
        """
        self._weight = weight

    def skip_nonfinite(self):
        """Leaves out, on all ranks, updates whose gradients are not all finite.

        Call it before the first step is traced. It returns the variable that counts
        them; overflows that a `LossScaleOptimizer` skips are none of them.
        """
        self._skipping = self._skipping or UpdateSkipping(self._optimizer)
        return self._skipping.count

    def build(self, variables):
        """As `keras.optimizers.Optimizer.build`."""
        self._build(variables)
        shard_slots(self._optimizer, variables)

    def apply(self, grads, trainable_variables=None):
        """As `keras.optimizers.Optimizer.apply`."""
        # AutoGraph converts this method, since it has to convert an `apply` of a user's
        # own class.
        arguments = self._prepare(grads, trainable_variables)
        if arguments:
            self._apply(*arguments)
            self._check_reduced()

    @do_not_convert
    def _prepare(self, grads, trainable_variables):
        """Returns the arguments of Keras' `apply`, or None without gradients."""
        # Either argument may be an iterator, which can be read only once.
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if not grads:
            return None
        if trainable_variables is None and not self._optimizer.built:
            # Keras raises the error, and the optimizer can be built afterwards.
            self._apply(grads)
        check_loss_scale(self._loss_scale_optimizer)
        variables = trainable_variables or list(self._optimizer._trainable_variables)
        _check_not_overwritten(grads, variables)
        check_elementwise(self._optimizer, variables)
        self.reducer.check(variables, [process_set for process_set, _ in self.axes()])
        self._clip.check()
        if self._weight != 1 and has_summed_gradients(variables):
            raise ValueError(
                "Gradients of tables that are divided over the data ranks are sums "
                "over ranks, and cannot be weighted by rank. Received: the weight "
                f"{self._weight}. Use equal batch sizes on all ranks."
            )
        self._check_first_step(variables)
        # Keras removes gradients that are None before it clips.
        self._places = [i for i, gradient in enumerate(grads) if gradient is not None]
        self._variables = variables
        self._has_reduced = False
        if self._skipping:
            self._skipping.begin()
        return grads, trainable_variables

    def clip_gradients(self, grads):
        """Combines `grads` over all ranks, then clips them as the optimizer does."""
        self._has_reduced = True
        factor = self._window_factor * self._weight
        if factor != 1:
            grads = [map_values(lambda v: v * factor, gradient) for gradient in grads]
        gradients = [None] * len(self._variables)
        for place, gradient in zip(self._places, grads, strict=True):
            gradients[place] = gradient
        reduce = self.sharded_state.reduce if self.sharded_state else self.reducer
        summed = sum_duplicate_rows(reduce(gradients, self._variables), self._variables)
        reduced = [summed[place] for place in self._places]
        variables = [self._variables[place] for place in self._places]
        clipped = self._clip(reduced, variables)
        if self._skipping:
            # Both: clipping makes infinity finite, and large gradients NaN.
            self._skipping.note(self._all_finite([*reduced, *clipped]))
        return clipped

    def _all_finite(self, gradients):
        finite = all_finite(gradients)
        # Reduced gradients are equal on all ranks, unless they are parts, or those of
        # local variables.
        is_scattered = self.sharded_state and self.sharded_state.is_scattered
        if self.mesh or is_scattered or self.reducer.differ_by_rank(self._variables):
            # The ranks that have the other parts skip a step together with this one.
            finite = ops.is_true_on_all_ranks(
                finite, name="FiniteGradients", process_set=self.all_ranks
            )
        return finite

    def share_finite_check(self, loss_scale_optimizer):
        """Makes all ranks skip a step when one of them overflows."""
        if self._loss_scale_optimizer is loss_scale_optimizer:
            return
        # Compiling again puts a new LossScaleOptimizer around the same optimizer.
        self._loss_scale_optimizer = loss_scale_optimizer
        share_overflow(loss_scale_optimizer, self.all_ranks)

    def _check_first_step(self, variables):
        # A retrace does not check again: not all ranks may retrace.
        if not self._is_first_step:
            return
        if not self._optimizer.built:
            # As Keras' apply does next: some ranks may have built it before.
            with keras.name_scope(self._optimizer.name, caller=self._optimizer):
                self._optimizer.build(variables)
        weights = [v for v in variables if not self.reducer.is_local(v)]
        state = non_local_state(self._optimizer, variables, self.reducer.local_keys)
        for process_set, _ in self.axes():
            copies = [
                variable
                for variable in weights + state
                if is_replicated(variable, process_set)
            ]
            check_first_step(copies, process_set=process_set)
        if self.sharded_state:
            with tf.init_scope():
                self.sharded_state.check_start(self.all_ranks)
        self._is_first_step = False

    @do_not_convert
    def _check_reduced(self):
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


def _check_not_overwritten(grads, variables):
    # Lists of different lengths are an error that Keras reports.
    given = [v for g, v in zip(grads, variables, strict=False) if g is not None]
    if any(getattr(variable, "overwrite_with_gradient", False) for variable in given):
        raise NotImplementedError(
            "float8 training overwrites variables with their gradients, which cannot "
            "be reduced over ranks. Use float32, mixed_bfloat16 or mixed_float16."
        )
