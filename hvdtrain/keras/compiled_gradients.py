"""XLA for the gradients of a model, whose reduction stays outside of XLA.

XLA compiles a function as a whole, and has no kernels for collectives. Keras' own
`train_step` calls one method of the optimizer, `apply_gradients`, which is where
gradients are reduced. So a function that XLA compiles runs this step with a substitute
of the method, and returns the gradients; they are applied after it. They are outputs of
one function: all of them are computed before the first one is reduced.
"""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import tensorflow as tf
from keras.src.trainers.trainer import Trainer

from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.keras.gradients import Gradient
from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import Optimizer, Variable, is_distributed

_IS_OFF = (
    "XLA, which model.compile enables on GPUs by default, is disabled for the model "
    "{!r}: it cannot compile the reduction of gradients. Pass jit_compile=True to "
    "compile the forward and backward pass, or jit_compile=False to silence this "
    "warning."
)
_OWN_STEP = (
    "XLA compiles nothing of {}.train_step: it cannot compile the reduction of "
    "gradients. Call super().train_step, or compute the gradients of the step in a "
    "tf.function(jit_compile=True), and pass jit_compile=False to model.compile()."
)
_Result = TypeVar("_Result")


class _Default(int):
    """The value of `model.jit_compile` where Keras has enabled XLA by default.

    It equals True, and is another object: Keras stores it as if the user had passed it,
    and TensorFlow ignores an assignment of the object that an attribute has already.
    """


@functools.cache
def install() -> None:
    """Make models with a distributed optimizer compile gradients instead of steps.

    Methods of the classes are replaced: an optimizer has no reference to its model, and
    a user's `train_step` may call the one of Keras.
    """
    resolve = Trainer._resolve_auto_jit_compile
    make, train_step = keras.Model.make_train_function, keras.Model.train_step

    @functools.wraps(resolve)
    def resolve_auto(self: keras.Model) -> bool | _Default:
        return resolve(self) and _Default(True)

    @functools.wraps(make)
    def make_train_function(self: keras.Model, force: bool = False) -> None:
        disable_default(self)
        if not compiles_gradients(self):
            make(self, force)
            return
        before = self.train_function
        self.jit_compile = False
        try:
            make(self, force)
        finally:
            self.jit_compile = True
        if self.train_function is not before:
            function = warning_of_own_step(self, self.train_function)
            replace(self, "train_function", function, by=install)

    @do_not_convert
    @functools.wraps(train_step)
    def train_step_in_two(self: keras.Model, data: Any) -> Any:
        if compiles_gradients(self) and not tf.executing_eagerly():
            return _train_step(self, data, train_step)
        return train_step(self, data)

    replace(Trainer, "_resolve_auto_jit_compile", resolve_auto, by=install)
    replace(keras.Model, "make_train_function", make_train_function, by=install)
    replace(keras.Model, "train_step", train_step_in_two, by=install)


def compiles_gradients(model: keras.Model) -> bool:
    """Return whether XLA compiles gradients, and not the steps that apply them."""
    return bool(model.jit_compile) and is_distributed(model.optimizer)


def disable_default(model: keras.Model) -> None:
    """Disable XLA where Keras has chosen it, for a model that the ranks train.

    That is on GPUs, where neither its speed nor its memory have been measured here.
    Rank 0 warns. Models that were compiled before `install` keep what Keras has chosen:
    it cannot be told from what a user has passed.
    """
    is_default = isinstance(model.jit_compile, _Default)
    if not (is_default and compiles_gradients(model)):
        return
    model.jit_compile = False
    model.train_function = None
    if global_process_set.rank() == 0:
        warnings.warn(_IS_OFF.format(model.name), stacklevel=3)


def warning_of_own_step(
    model: keras.Model, function: Callable[..., _Result]
) -> Callable[..., _Result]:
    """Return a function of training steps that warns if XLA compiles nothing of them.

    That is where a user's `train_step` does not call the one of Keras. The first call,
    which traces the step, warns on rank 0.

    Args:
        model: a compiled model.
        function: takes steps with `model.train_step`.
    """
    if not (compiles_gradients(model) and has_own_step(model)):
        return function
    calls = itertools.count()

    def take_steps(*args: Any) -> _Result:
        result = function(*args)
        is_in_xla = getattr(model, "_hvdtrain_step_in_xla", False)
        if not (next(calls) or is_in_xla or global_process_set.rank()):
            warnings.warn(_OWN_STEP.format(type(model).__name__), stacklevel=2)
        return result

    return take_steps


def has_own_step(model: keras.Model) -> bool:
    """Return whether the class of a model has a `train_step` that is not Keras'."""
    return type(model).train_step is not keras.Model.train_step


def _train_step(
    model: keras.Model, data: Any, train_step: Callable[[keras.Model, Any], Any]
) -> Any:
    """Compute metrics and gradients in XLA, and apply the gradients outside of it."""
    variables: list[Variable] = []

    @do_not_convert
    def compute(data: Any) -> tuple[Any, list[Gradient | None]]:
        with _collected(model.optimizer) as collected:
            logs = train_step(model, data)
        # A function that creates variables is traced twice.
        variables[:] = [variable for _, variable in collected]
        return logs, [gradient for gradient, _ in collected]

    compiled = tf.function(compute, jit_compile=True, reduce_retracing=True)
    logs, gradients = compiled(data)
    model._hvdtrain_step_in_xla = True
    if variables:
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return logs


@contextlib.contextmanager
def _collected(
    optimizer: Optimizer,
) -> Iterator[list[tuple[Gradient | None, Variable]]]:
    """Yield a list of the gradients and variables that `optimizer` is called with."""
    collected: list[tuple[Gradient | None, Variable]] = []
    replace(optimizer, "apply_gradients", collected.extend, by=_collected)
    try:
        yield collected
    finally:
        del optimizer.apply_gradients
