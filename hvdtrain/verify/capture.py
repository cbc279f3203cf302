"""Puts recorders into TensorFlow and Keras, for a script that has no part in it.

A step is a new iteration of an optimizer. It is noticed after a batch of `fit`, after
`train_on_batch`, and where a loop asks a `tf.data.Dataset` for its next batch. Batches
come from datasets, which `fit` makes of arrays and generators as well, or are arguments
of `train_on_batch`.
"""

import contextlib
import functools
import inspect
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import horovod.tensorflow
import horovod.tensorflow.keras
import keras
import tensorflow as tf
from tensorflow.python.framework import random_seed

from hvdtrain.keras.gradients import GradientReducer
from hvdtrain.keras.seams import replace
from hvdtrain.verify.batches_by_rank import Batch, BatchRecorder, BatchReplacer
from hvdtrain.verify.step_recorder import StepRecorder
from hvdtrain.verify.traced_reductions import replace_for_script

# Over one rank, these return their first argument.
_COLLECTIVES = (
    *("allreduce", "allgather", "alltoall", "reducescatter"),
    *("grouped_allreduce", "grouped_allgather", "grouped_reducescatter"),
)
# Receives an iterator over a dataset.
EndOfIterator: TypeAlias = Callable[[Iterator[Batch]], None]
_POLICIES = ("set_dtype_policy", "set_floatx", "set_global_policy")


def record_steps(recorder: StepRecorder, *, on_end: EndOfIterator) -> None:
    """Make `recorder` see the optimizers of this process and each of their steps.

    Args:
        on_end: called where a loop in Python has read an iterator to its end.
    """

    def add(optimizer: Any, *_: Any) -> None:
        recorder.add(optimizer)

    def record(*_: Any, **__: Any) -> None:
        recorder.record()

    def name(variable: Any, *_: Any, **__: Any) -> None:
        recorder.names.add(variable)

    _call_after(keras.Variable, "__init__", name)
    _call_after(keras.optimizers.Optimizer, "build", add)
    _call_after(keras.Model, "train_on_batch", record)
    _call_after(keras.callbacks.CallbackList, "on_train_batch_end", record)
    _record_in_loops(recorder, on_end)


def _record_in_loops(recorder: StepRecorder, on_end: EndOfIterator) -> None:
    """Make `recorder` see the steps between the batches of a loop in Python."""
    iterate = tf.data.Dataset.__iter__
    followed: list[type] = []

    def iterate_and_record(self: tf.data.Dataset) -> Iterator[Batch]:
        iterator = iterate(self)
        if type(iterator) not in followed:
            followed.append(type(iterator))
            for name in ("__next__", "get_next"):
                _record_before(type(iterator), name, recorder, on_end)
        return iterator

    # The class of an iterator is not public, and making one of it here would start
    # TensorFlow before the script has configured it.
    tf.data.Dataset.__iter__ = iterate_and_record


def _record_before(
    iterator: type, name: str, recorder: StepRecorder, on_end: EndOfIterator
) -> None:
    advance = getattr(iterator, name)

    def record_and_advance(self: Iterator[Batch]) -> Batch:
        if _is_in_script():
            recorder.record()
        try:
            return advance(self)
        except (StopIteration, tf.errors.OutOfRangeError):
            on_end(self)
            raise

    setattr(iterator, name, record_and_advance)


def _is_in_script() -> bool:
    """Return whether a dataset is iterated by the script, or by Keras for it.

    An iteration inside of a function is a part of its graph. A generator of Python that
    reads a dataset runs in a thread of TensorFlow, at any time of a step.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and tf.executing_eagerly()


def _call_after(owner: type, name: str, action: Callable[..., None]) -> None:
    """Make a method of Keras call `action` with its arguments at its end."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def method_then(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        action(*args, **kwargs)
        return result

    replace(owner, name, method_then, by=record_steps)


def exchange_batches(batches: BatchRecorder | BatchReplacer) -> None:
    """Make datasets and `train_on_batch` take their batches from `batches`."""
    dataset = tf.data.Dataset
    iterate, train_on_batch = dataset.__iter__, keras.Model.train_on_batch

    def iterate_exchanged(self: tf.data.Dataset) -> Iterator[Batch]:
        return batches.iterate(self, iterate) if _is_in_script() else iterate(self)

    @functools.wraps(train_on_batch)
    def train_on_exchanged(
        self: keras.Model,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        x, y, sample_weight = batches.exchange_arguments((x, y, sample_weight))
        return train_on_batch(self, x, y, sample_weight, class_weight, return_dict)

    dataset.__iter__ = iterate_exchanged
    replace(keras.Model, "train_on_batch", train_on_exchanged, by=exchange_batches)


def note_other_loops(batches: BatchRecorder) -> None:
    """Note the batches of evaluations, and datasets that are iterated in a graph."""
    reduce = tf.data.Dataset.reduce

    def reduce_and_note(self: tf.data.Dataset, *args: Any, **kwargs: Any) -> Any:
        # AutoGraph makes it of `for batch in dataset`.
        batches.has_loops_in_graphs |= not tf.executing_eagerly()
        return reduce(self, *args, **kwargs)

    tf.data.Dataset.reduce = reduce_and_note
    for name in ("evaluate", "predict"):
        _note_evaluation(name, batches)


def _note_evaluation(name: str, batches: BatchRecorder) -> None:
    method = getattr(keras.Model, name)

    @functools.wraps(method)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        with batches.evaluation():
            return method(*args, **kwargs)

    replace(keras.Model, name, evaluate, by=note_other_loops)


def note_class_weights(recorder: StepRecorder) -> None:
    """Note the argument `class_weight` of calls of the script."""

    def replaced(name: str) -> Callable[..., Any]:
        method = getattr(keras.Model, name)
        parameters = inspect.signature(method)

        @functools.wraps(method)
        def note_and_call(*args: Any, **kwargs: Any) -> Any:
            # Wrong arguments are errors of the method.
            with contextlib.suppress(TypeError):
                weights = parameters.bind(*args, **kwargs).arguments.get("class_weight")
                text = ", ".join(
                    f"{k}: {float(v):.6g}" for k, v in sorted((weights or {}).items())
                )
                if text and text not in recorder.class_weights:
                    recorder.class_weights.append(text)
            return method(*args, **kwargs)

        return note_and_call

    for name in ("fit", "train_on_batch"):
        replace(keras.Model, name, replaced(name), by=note_class_weights)


def note_losses(recorder: StepRecorder) -> None:
    """Note which losses are means over samples, when they are first computed."""
    noted = recorder.are_means

    def note(
        loss: keras.losses.Loss, y_true: Any, y_pred: Any, *_: Any, **__: Any
    ) -> None:
        # The container that `compile` makes calls the losses in it.
        if type(loss).__name__ == "CompileLoss" or loss in noted:
            return
        if not (tf.is_tensor(y_true) and tf.is_tensor(y_pred) and y_pred.shape.rank):
            return
        function = None
        # The losses of other batches cannot be computed where a loss reads other
        # tensors of the step, or depends on the number of samples.
        with contextlib.suppress(Exception):
            function = _without_batch_size(loss.call, y_true, y_pred, dtype=loss.dtype)
        if function is None or _has_collectives(function):
            # Or it may be the loss of all ranks' samples.
            noted[loss] = True
            return

        def compare(*tensors: tf.Tensor) -> None:
            if loss not in noted:
                noted[loss] = True
                with contextlib.suppress(Exception):
                    noted[loss] = _is_mean_over_samples(function, *tensors)

        # A step may be traced several times before it runs.
        tf.py_function(compare, [y_true, y_pred], [])

    _call_after(keras.losses.Loss, "__call__", note)


def _without_batch_size(
    function: Callable[..., Any], *tensors: tf.Tensor, dtype: str
) -> Any:
    """Return a compiled function of any number of rows of such tensors."""

    def call(*rows: tf.Tensor) -> Any:
        return function(*[tf.cast(each, dtype) for each in rows])

    specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in tensors]
    with tf.init_scope():
        return tf.function(call, autograph=False).get_concrete_function(*specs)


def _has_collectives(function: Any) -> bool:
    graph = function.graph.as_graph_def()
    inside = (node for each in graph.library.function for node in each.node_def)
    return any(
        node.op.startswith(("Horovod", "Hvdtrain")) for node in (*graph.node, *inside)
    )


def _is_mean_over_samples(
    function: Callable[..., tf.Tensor], y_true: tf.Tensor, y_pred: tf.Tensor
) -> bool:
    """Return whether the loss of a batch is the mean of the losses of its samples."""
    number = len(y_pred)

    def total(rows: slice) -> float:
        mean = tf.reduce_mean(function(y_true[rows], y_pred[rows]))
        return float(mean) * len(y_pred[rows])

    # The ratio of two sums may by chance be almost the same in halves of a batch.
    return all(
        math.isclose(
            total(slice(number)),
            total(slice(place)) + total(slice(place, number)),
            rel_tol=1e-3,
            abs_tol=1e-6 * number,
        )
        for place in {1, number // 4, number // 2, number - 1}
        if 0 < place < number
    )


def refuse_horovod() -> None:
    """Make the functions of Horovod that reduce gradients of Keras 2 raise an error."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "Received an optimizer or a tape of horovod, which does not support Keras "
            "3; expected one of hvdtrain: import hvdtrain.keras as hvd in every file."
        )

    for module in (horovod.tensorflow, horovod.tensorflow.keras):
        for name in ("DistributedOptimizer", "DistributedGradientTape"):
            if hasattr(module, name):
                setattr(module, name, refuse)


def compute_as_one_process() -> None:
    """Make this rank compute what a job of one rank computes.

    The size of the job stays: learning rates depend on it. Gradients are not reduced,
    and the collectives that the script calls return what they return over one rank.
    """
    GradientReducer.__call__ = (  # type: ignore[method-assign]
        lambda self, gradients, variables: list(gradients)
    )

    def over_one_rank(
        collective: Callable[..., Any], values: Any, *_: Any, **__: Any
    ) -> Any:
        if collective.__name__.startswith("grouped_"):
            return list(map(tf.convert_to_tensor, values))
        # A gradient of an embedding is no tensor.
        is_sparse = isinstance(values, tf.IndexedSlices)
        return values if is_sparse else tf.convert_to_tensor(values)

    for name in _COLLECTIVES:
        replace_for_script(name, over_one_rank)


def seed_operations(seed: int) -> None:
    """Seed the operations of TensorFlow that the script gives no seed.

    `tf.random.set_seed` would also change the numbers of operations that have a seed:
    in a job without a global seed they are equal on all ranks.
    """
    get_seed, numbers = random_seed.get_seed, itertools.count(1)

    def get_seed_or_next(op_seed: int | None) -> tuple[int | None, int | None]:
        found = get_seed(op_seed)
        return (seed, next(numbers)) if found == (None, None) else found

    random_seed.get_seed = get_seed_or_next


def compute_in(dtype: str) -> None:
    """Make Keras compute in one type, whatever policy the script sets."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    modules = (keras.config, keras.mixed_precision, keras.backend)
    in_top_k = tf.math.in_top_k
    # For the metrics of Keras that call it: it takes no float64.
    tf.math.in_top_k = lambda targets, predictions, k: in_top_k(
        targets, tf.cast(predictions, tf.float32), k
    )
    compatible = (tf.keras.config, tf.keras.mixed_precision, tf.keras.backend)
    for module in (*modules, *compatible):
        for name in _POLICIES:
            if hasattr(module, name):
                setattr(module, name, lambda *args, **kwargs: None)
