"""Weight decay in the memory of the weights."""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from hvdtrain.keras.gradients import Gradient
from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import Optimizer, Variable, variable_key


class WeightDecay:
    """Decays each weight of an optimizer after its gradient has been computed.

    The decay in Keras does not depend on the gradients. TensorFlow starts it while the
    step still reads the weights, and has to copy each of them.

    In a graph, `_apply_weight_decay` of the optimizer is called for each variable. The
    optimizers of a `MultiOptimizer` decay as in Keras.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._gradients: dict[object, Gradient] = {}
        self._apply = replace(
            optimizer, "_apply_weight_decay", self.apply, by=WeightDecay
        )

    def follow(
        self, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> None:
        """Set the gradients after which the weights of this step are decayed."""
        if self._follows():
            keys = map(variable_key, variables)
            self._gradients = dict(zip(keys, gradients, strict=True))

    def apply(self, variables: Iterable[Variable]) -> None:
        """Decay `variables`, as Keras does."""
        gradients, self._gradients = self._gradients, {}
        if not self._follows():
            self._apply(variables)
            return
        for variable in variables:
            gradient = gradients.get(variable_key(variable))
            with tf.control_dependencies([] if gradient is None else [gradient]):
                self._apply([variable])

    def _follows(self) -> bool:
        """Whether operations are traced: eager ones run in their order."""
        return self._optimizer.weight_decay is not None and not tf.executing_eagerly()
