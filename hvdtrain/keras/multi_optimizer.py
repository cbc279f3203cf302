"""The hook of a `MultiOptimizer`, which has an optimizer for each group of weights."""

from collections.abc import Iterable

import keras

from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.keras.gradients import Gradient
from hvdtrain.keras.hook import ReductionHook
from hvdtrain.keras.variables import Variable, optimizers_inside
from hvdtrain.sharding.optimizer_checks import check_elementwise
from hvdtrain.sharding.shards import is_split_over_ranks


class MultiOptimizerHook(ReductionHook):
    """Reduces the gradients of all weights before the optimizers receive theirs.

    Each of the optimizers accumulates, clips and applies its own gradients, and calls
    only its own methods. So the reduction comes before accumulation: in every call,
    and the accumulated gradients are replicated.
    """

    def build(self, variables: list[keras.Variable]) -> None:
        super().build(variables)
        if self._skipping:
            # A callable instead of an OptimizerMap returns its optimizers only now.
            self._skip_updates()

    def apply(
        self,
        grads: Iterable[Gradient | None],
        trainable_variables: Iterable[Variable] | None = None,
    ) -> None:
        arguments = self._prepare(grads, trainable_variables)
        if arguments:
            gradients, variables = arguments
            self._apply(self._reduce(gradients), variables)

    def _skip_updates(self) -> None:
        for optimizer in optimizers_inside(self._optimizer):
            if optimizer.gradient_accumulation_steps:
                raise ValueError(
                    "Updates that are not finite cannot be skipped where an optimizer "
                    "of a MultiOptimizer accumulates gradients: the accumulated ones "
                    f"would keep the NaN. Received: {optimizer.name!r} with "
                    "gradient_accumulation_steps="
                    f"{optimizer.gradient_accumulation_steps}."
                )
        super()._skip_updates()

    @do_not_convert
    def _reduce(self, gradients: list[Gradient | None]) -> list[Gradient | None]:
        self._check_optimizers()
        reduced = iter(self.clip_gradients([g for g in gradients if g is not None]))
        return [None if g is None else next(reduced) for g in gradients]

    def _check_optimizers(self) -> None:
        for optimizer in optimizers_inside(self._optimizer):
            variables = optimizer._trainable_variables
            check_elementwise(optimizer, variables)
            clips = optimizer.clipnorm or optimizer.global_clipnorm
            if not clips or not variables:
                continue
            if is_split_over_ranks(variables) or self.reducer.differ_by_rank(variables):
                raise ValueError(
                    "An optimizer of a MultiOptimizer clips by the norm of the "
                    "gradients on this rank, which differs by rank where weights are "
                    f"sharded or local. Received: {optimizer.name!r} with clipnorm="
                    f"{optimizer.clipnorm} and global_clipnorm="
                    f"{optimizer.global_clipnorm}. Use clipvalue."
                )
