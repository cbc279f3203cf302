"""Records the gradients of the first step, before the optimizer reduces them."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.dtypes import map_values
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.keras.seams import replace
from hvdtrain.verify.variable_names import VariableNames


class FirstGradients:
    """Records the norm of each variable's gradient in the first step of its optimizer.

    Args:
        divisor: gradients are divided by it before the optimizer gets them.
    """

    def __init__(self, names: VariableNames, *, divisor: float = 1.0) -> None:
        self._names = names
        self._divisor = divisor
        # By the names of the variables of one call.
        self._norms: dict[tuple[str, ...], tf.Variable] = {}

    def norms(self) -> dict[str, float]:
        """Return the norms by name of the variable, of the steps that were taken."""
        norms: dict[str, float] = {}
        for names, values in self._norms.items():
            norms.update(zip(names, values.numpy().tolist(), strict=True))
        return norms

    @do_not_convert
    def add(
        self, optimizer: Any, gradients: Iterable[Any], variables: Iterable[Any] | None
    ) -> tuple[list[Any], list[Any] | None]:
        """Note the gradients of a call of `apply`, and return its arguments."""
        gradients = list(gradients)
        variables = None if variables is None else list(variables)
        known = variables or optimizer._trainable_variables
        # Keras raises an error for other arguments.
        if gradients and len(gradients) == len(known):
            self._note(optimizer, gradients, known)
        if self._divisor != 1:
            gradients = [
                None if each is None else map_values(self._divide, each)
                for each in gradients
            ]
        return gradients, variables

    def _divide(self, values: tf.Tensor) -> tf.Tensor:
        return values / tf.cast(self._divisor, values.dtype)

    def _note(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        by_variable = {
            name: _norm(gradient)
            for name, gradient in zip(
                self._names.by_name(variables), gradients, strict=False
            )
            if gradient is not None
        }
        names = tuple(by_variable)
        with tf.init_scope():
            if names not in self._norms:
                zeros = tf.zeros(len(names), tf.float64)
                self._norms[names] = tf.Variable(zeros, trainable=False)
        noted = self._norms[names]
        is_first = tf.equal(tf.convert_to_tensor(optimizer._iterations), 0)
        # A step may be traced several times, and in XLA there is no Python.
        noted.assign(tf.where(is_first, tf.stack(list(by_variable.values())), noted))


def _norm(gradient: Any) -> tf.Tensor:
    # Rows that are equal are not added up: the norms of equal batches are compared.
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    values = gradient.values if is_sparse else tf.convert_to_tensor(gradient)
    if values.dtype != tf.float64:
        values = tf.cast(values, tf.float32)
    return tf.cast(tf.norm(values), tf.float64)


def note_first_gradients(noted: FirstGradients) -> None:
    """Make `noted` see the gradients that all optimizers of this process apply."""
    apply = keras.optimizers.Optimizer.apply

    @functools.wraps(apply)
    def note_and_apply(
        self: Any, grads: Iterable[Any], trainable_variables: Any = None
    ) -> Any:
        gradients, variables = noted.add(self, grads, trainable_variables)
        return apply(self, gradients, variables)

    replace(
        keras.optimizers.Optimizer, "apply", note_and_apply, by=note_first_gradients
    )
