"""The hook by which an optimizer's gradients are reduced inside of Keras' own step."""

import keras
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.collectives.transport import Sum
from hvdtrain.keras.consistency import check_first_step
from hvdtrain.keras.learning_rates import without_loss_scale
from hvdtrain.keras.optimizer_state import replicated_state


class ReductionHook:
    """Reduces an optimizer's gradients between accumulation and clipping.

    Keras calls, in this order: `apply_gradients`, `apply`, and inside of it
    `_clip_gradients` with the gradients of a complete window, also when nothing is
    to be clipped. The hook takes the place of these three methods on one instance.
    """

    def __init__(self, optimizer, reducer, *, window_factor):
        self._optimizer = optimizer
        self.reducer = reducer
        self._window_factor = window_factor
        self._variables, self._places = [], []
        self._has_reduced = False
        self._is_outermost = False
        self._settled_scale = None
        self._has_shared_check = False
        self._is_first_step = True
        self.is_configured = False
        self._apply_gradients = optimizer.apply_gradients
        self._apply = optimizer.apply
        self._clip_gradients = optimizer._clip_gradients
        optimizer.reduction_hook = self
        optimizer.apply_gradients = self.apply_gradients
        optimizer.apply = self.apply
        optimizer._clip_gradients = self.clip_gradients

    def apply_gradients(self, grads_and_vars):
        """As `keras.optimizers.Optimizer.apply_gradients`."""
        self._is_outermost = True
        try:
            return self._apply_gradients(grads_and_vars)
        finally:
            self._is_outermost = False

    def apply(self, grads, trainable_variables=None):
        """As `keras.optimizers.Optimizer.apply`."""
        grads = list(grads)
        if not grads:
            return
        self._check_not_conditional()
        self._has_shared_check = False
        variables = list(trainable_variables or self._optimizer._trainable_variables)
        _check_reducible(grads, variables)
        # Keras leaves out gradients that are None before it clips.
        self._places = [i for i, gradient in enumerate(grads) if gradient is not None]
        self._variables = variables
        self._has_reduced = False
        self._apply(grads, trainable_variables)
        self._check_reduced()

    def clip_gradients(self, grads):
        """Combines `grads` over all ranks, then clips them as the optimizer does."""
        self._has_reduced = True
        self._check_first_step()
        if self._window_factor != 1:
            grads = [gradient * self._window_factor for gradient in grads]
        gradients = [None] * len(self._variables)
        for place, gradient in zip(self._places, grads, strict=True):
            gradients[place] = gradient
        reduced = self.reducer(gradients, self._variables)
        return self._clip_gradients([reduced[place] for place in self._places])

    def share_finite_check(self, loss_scale_optimizer):
        """Makes all ranks skip a step together when one of them overflows."""
        if self._settled_scale is loss_scale_optimizer:
            return
        # Compiling again puts a new LossScaleOptimizer around the same optimizer.
        self._settled_scale = loss_scale_optimizer
        check_locally = loss_scale_optimizer.check_finite
        process_set = self.reducer.process_set

        def check_finite(grads):
            # Seen by `apply`, which the LossScaleOptimizer calls next.
            self._has_shared_check = True
            finite = check_locally(grads)
            if not needs_communication(process_set):
                return finite
            # Overflows are counted, not the lack of one: a rank that has joined
            # contributes zeros.
            overflows = ops.allreduce(
                tf.cast(tf.logical_not(finite), tf.int32),
                name="LossScaleOverflow",
                op=Sum,
                process_set=process_set,
            )
            return tf.equal(overflows, 0)

        loss_scale_optimizer.check_finite = check_finite

    def _check_not_conditional(self):
        # Reached through a LossScaleOptimizer that nobody settled: the branch that
        # is traced here would run on the ranks without overflow only.
        graph = tf.compat.v1.get_default_graph()
        in_branch = type(graph).__name__ == "CondBranchFuncGraph"
        if in_branch and not (self._is_outermost or self._has_shared_check):
            raise ValueError(
                "compile() has put the distributed optimizer into a LossScaleOptimizer "
                "that checks for overflow on each rank alone. Add "
                "hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks, "
                "make an hvd.elastic.KerasState of the model after compile(), or "
                "pass hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer"
                "(optimizer)) to compile()."
            )

    def _check_first_step(self):
        # Here and not in `apply`: by now Keras has built the optimizer.
        if not self._is_first_step:
            return
        local = self.reducer.local_keys
        weights = [v for v in self._variables if not self.reducer.is_local(v)]
        state = replicated_state(self._optimizer, self._variables, local)
        check_first_step(weights + state, process_set=self.reducer.process_set)
        # A retrace, which not all ranks may do, does not check again.
        self._is_first_step = False

    def _check_reduced(self):
        # Training on without a reduction would look right and be wrong: never be
        # silent about it, whatever a custom optimizer or a later Keras overrides.
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


def hook_of(optimizer):
    """Returns the `ReductionHook` of `optimizer`, or None."""
    return getattr(without_loss_scale(optimizer), "reduction_hook", None)


def _check_reducible(grads, variables):
    # Unequal numbers are for Keras to complain of.
    given = [v for g, v in zip(grads, variables, strict=False) if g is not None]
    if any(getattr(variable, "overwrite_with_gradient", False) for variable in given):
        raise NotImplementedError(
            "float8 training overwrites variables with their gradients, which cannot "
            "be reduced over ranks. Use float32, mixed_bfloat16 or mixed_float16."
        )
