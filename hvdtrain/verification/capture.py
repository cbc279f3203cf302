"""Puts recorders into TensorFlow and Keras, for a script that has no part in it.

A step is a new iteration of an optimizer. It is noticed after a batch of `fit`, after
`train_on_batch`, and where a loop asks a `tf.data.Dataset` for its next batch. Batches
come from datasets, which `fit` makes of arrays and generators as well, or are arguments
of `train_on_batch`.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.collectives.transport import op_name
from hvdtrain.keras.gradients import GradientReducer, Gradients
from hvdtrain.keras.seams import replace
from hvdtrain.verification.batches_by_rank import Batch, BatchRecorder, BatchReplacer
from hvdtrain.verification.step_recorder import StepRecorder

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

    _then(keras.optimizers.Optimizer, "build", add)
    _then(keras.Model, "train_on_batch", record)
    _then(keras.callbacks.CallbackList, "on_train_batch_end", record)
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
        # Not while a function is traced.
        if tf.executing_eagerly():
            recorder.record()
        try:
            return advance(self)
        except StopIteration:
            on_end(self)
            raise

    setattr(iterator, name, record_and_advance)


def _then(owner: type, name: str, action: Callable[..., None]) -> None:
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
        # An iteration inside of a function is a part of its graph.
        if not tf.executing_eagerly():
            return iterate(self)
        return batches.iterate(self, iterate)

    @functools.wraps(train_on_batch)
    def train_on_exchanged(
        self: keras.Model,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        **kwargs: Any,
    ) -> Any:
        x, y, sample_weight = batches.take((x, y, sample_weight))
        return train_on_batch(self, x, y, sample_weight, **kwargs)

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


def note_reductions(recorder: StepRecorder) -> None:
    """Note how gradients are reduced, when a step is traced."""
    reduce = GradientReducer.__call__

    def reduce_and_note(
        self: GradientReducer, gradients: Gradients, variables: list[Any]
    ) -> Gradients:
        reduction = self.options.reduction
        compression = getattr(reduction.compression, "__name__", "")
        recorder.reductions.append((op_name(reduction.op), compression))
        is_sparse = any(isinstance(each, tf.IndexedSlices) for each in gradients)
        recorder.has_dense_rows |= is_sparse and self.options.sparse_as_dense
        return reduce(self, gradients, variables)

    GradientReducer.__call__ = reduce_and_note  # type: ignore[method-assign]


def compute_as_one_process() -> None:
    """Make this rank compute what a job of one rank computes.

    The size of the job stays: learning rates depend on it. Gradients are not reduced,
    and the collectives that the script calls return what they return over one rank.
    """
    GradientReducer.__call__ = (  # type: ignore[method-assign]
        lambda self, gradients, variables: list(gradients)
    )
    for name in _COLLECTIVES:
        setattr(hvd, name, _over_one_rank(getattr(hvd, name)))


def _over_one_rank(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(values: Any, *args: Any, **kwargs: Any) -> Any:
        caller = inspect.currentframe().f_back.f_globals["__name__"]  # type: ignore[union-attr]
        if caller.startswith("hvdtrain."):
            # The package's own agreement of the ranks, such as on a checkpoint.
            return collective(values, *args, **kwargs)
        if collective.__name__.startswith("grouped_"):
            return list(map(tf.convert_to_tensor, values))
        # A gradient of an embedding is no tensor.
        sparse = isinstance(values, tf.IndexedSlices)
        return values if sparse else tf.convert_to_tensor(values)

    return call


def leave_out_dropout() -> None:
    """Make all layers of dropout return their inputs: masks are drawn for a batch."""
    replace(
        keras.src.backend.random,
        "dropout",
        lambda inputs, rate, noise_shape=None, seed=None: inputs,
        by=leave_out_dropout,
    )


def compute_in(dtype: str) -> None:
    """Make Keras compute in one type, whatever policy the script sets."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    modules = (keras.config, keras.mixed_precision, keras.backend)
    compatible = (tf.keras.config, tf.keras.mixed_precision, tf.keras.backend)
    for module in (*modules, *compatible):
        for name in _POLICIES:
            if hasattr(module, name):
                setattr(module, name, lambda *args, **kwargs: None)
