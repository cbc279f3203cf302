"""What a TensorFlow graph needs around a collective.

TensorFlow treats Horovod's operations as stateless functions of their inputs. It may
therefore start two of them in any order, fold one whose inputs are constants, and
prune one whose result is unused. Other ranks take part in each of them: an operation
that one rank reorders or leaves out is a deadlock on the others.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdtrain.collectives import threads
from hvdtrain.collectives.dtypes import mark_internal
from hvdtrain.collectives.process_sets import ProcessSet
from hvdtrain.native import recorder

# A nest of tensors.
Nest = TypeVar("Nest")
# Decorator of the functions that users call in a tf.function of their own. AutoGraph
# would convert such a function and all that it calls, which takes seconds in the first
# step and changes nothing: none of them branches on the value of a tensor.
do_not_convert = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective as it is recorded.

    Attributes:
        operation: the kind of the collective, such as "broadcast".
        tensors: what this rank sends: it arrives when they are computed.
    """

    name: str
    operation: str
    tensors: Sequence[tf.Tensor | tf.IndexedSlices | tf.Variable]
    process_set: ProcessSet

    def recorded(self) -> AbstractContextManager[None]:
        """Return a context that records the collective in eager execution."""
        return recorder.collective(
            self.name,
            self.operation,
            size_bytes=self._size_bytes(),
            is_of_all_ranks=self._is_of_all_ranks(),
        )

    def enter(self) -> list[tf.Tensor]:
        """Return a tensor of the graph that records the arrival, in a list.

        The list is empty without the native library.
        """
        operations = recorder.operations()
        if not operations:
            return []
        sent = [t for t in self.tensors if not isinstance(t, tf.Variable)]
        with (
            tf.control_dependencies(_tensors(sent)),
            tf.device("CPU"),
        ):
            record = operations.hvdtrain_enter_collective(
                token=order_token().handle,
                collective=self.name,
                operation=self.operation,
                bytes=self._size_bytes(),
                of_all_ranks=self._is_of_all_ranks(),
            )
        return [record]

    def leave(self, records: list[tf.Tensor]) -> list[tf.Operation]:
        """Return an operation that records the end, given the result of `enter`."""
        operations = recorder.operations()
        with tf.device("CPU"):
            return [
                operations.hvdtrain_leave_collective(
                    record=record, token=order_token().handle
                )
                for record in records
                if operations
            ]

    def _is_of_all_ranks(self) -> bool:
        # A rank that has joined takes part in the collectives of the others.
        return self.process_set.process_set_id == 0 and self.operation != "join"

    def _size_bytes(self) -> int:
        sizes = [
            (tensor.shape.num_elements() or 0) * tensor.dtype.size
            for tensor in self.tensors
            if not isinstance(tensor, tf.IndexedSlices)
        ]
        return sum(sizes)


def serialize(
    exchange: Callable[[], Nest],
    call: Call,
    *,
    guard: Callable[[], list[tf.Tensor] | tf.Operation] | None = None,
) -> Nest:
    """Return `exchange()`, ordered after every collective traced before it.

    TensorFlow starts every operation whose inputs are ready. Two functions, or two
    calls of one function, hold operations of the same name: two that are in flight
    together on one rank would be matched with each other's counterpart on another
    rank, where they became ready in another order. So each exchange reads a variable,
    the token, that the previous one has written. TensorFlow orders the reads and
    writes of a variable across functions, branches and loops, where control
    dependencies alone end at the function's boundary. The operations that `guard`
    returns run before the exchange. `call` describes the exchange in the record.
    """
    token = order_token()
    if tf.executing_eagerly():
        with threads.in_call(), call.recorded():
            if guard:
                guard()
            results = exchange()
        token.assign_add(1)
        return results
    graph = tf.compat.v1.get_default_graph()
    # The backward function of a function whose gradient is taken outside of it has no
    # automatic control dependencies: a second order within one graph.
    previous = getattr(graph, "_hvdtrain_previous", [])
    with tf.control_dependencies([*previous, token.read_value()]):
        records = call.enter()
        with tf.control_dependencies(records):
            guards = tf.nest.flatten(guard()) if guard else []
        with tf.control_dependencies([*records, *guards]):
            results = exchange()
    with tf.control_dependencies(_tensors(results)):
        left = call.leave(records)
    with tf.control_dependencies([*left, *_tensors(results)]):
        written = token.assign_add(1)
    graph._hvdtrain_previous = [written]
    # A result is released after the write: whatever depends on it, also another
    # collective, starts later than the next reader of the token may.
    with tf.control_dependencies([written]):
        return tf.nest.map_structure(tf.identity, results, expand_composites=True)


def _tensors(nest: object) -> list[tf.Tensor]:
    return tf.nest.flatten(nest, expand_composites=True)


def number_of_collectives() -> int:
    """Return how many collectives this process has run, eagerly or in functions."""
    return int(order_token())


def block_constant_folding(tensor: tf.Tensor) -> tf.Tensor:
    """Return `tensor` such that the optimizer of graphs cannot see it as a constant.

    Grappler evaluates an operation whose inputs are all constants once, when it
    optimizes the graph, and replaces it by the result. For a collective that is wrong:
    the values of other ranks change from step to step. One input that is not a constant
    is enough, so block a small one: the select copies its input.
    """
    if tf.executing_eagerly():
        return tensor
    return tf.where(_unknown_true(), tensor, tf.zeros_like(tensor))


def prevent_pruning(result: tf.Tensor | tf.IndexedSlices) -> None:
    """Keep the collectives that compute `result` in the graph, used or not.

    Grappler prunes operations whose results are unused; the other ranks would wait
    for this one until the stall limit. An Assert has a side effect and is kept.
    """
    if tf.executing_eagerly():
        return
    tensors = _tensors(result)
    # One element is enough: an Assert copies its data from a GPU.
    data = [tf.reshape(tensor, [-1])[:1] for tensor in tensors]
    tf.raw_ops.Assert(condition=_unknown_true(), data=data)


def operation_name(base: str, process_set: ProcessSet) -> str:
    """Return `base`, made unique among the operations of the graph being traced.

    Horovod matches ranks by the names of operations. Layer names in Keras count up with
    every model that a process builds, so they differ between ranks as soon as one
    rank has built one more model. Names counted within one function agree, since
    every rank of the process set traces the same function.

    Raises:
        ValueError: the function is going to be compiled by XLA, or vectorized.
    """
    _check_not_compiled_by_xla(base)
    _check_not_vectorized()
    if process_set.process_set_id:
        # A rank outside the set traces none of its operations: if all sets had one
        # count, the numbers would differ between ranks.
        base = f"{base}_set{process_set.process_set_id}"
    if tf.executing_eagerly():
        return base
    graph = tf.compat.v1.get_default_graph()
    with graph.name_scope(None):
        return graph.unique_name(base)


def _check_not_compiled_by_xla(name: str) -> None:
    # At trace time: XLA itself fails later, with "No registered OpKernel".
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise ValueError(
            f"Collectives cannot be compiled by XLA. Received: {name} in a function "
            "with jit_compile=True. Pass jit_compile=False to model.compile() or "
            "tf.function(). A function without collectives, which computes gradients "
            "for example, may be compiled alone."
        )


def _check_not_vectorized() -> None:
    # TensorFlow converts the operations of the body afterwards, and fails at ours with
    # pages of text. The graph of the body has no mark: look for the caller.
    frame = None if tf.executing_eagerly() else inspect.currentframe()
    while frame:
        if frame.f_code.co_name == "_pfor_impl":
            raise ValueError(
                "Collectives cannot be vectorized. Received a function that calls one "
                "and that tf.vectorized_map vectorizes. Call the collective once on "
                "the result of the map, or use tf.map_fn."
            )
        frame = frame.f_back


def _unknown_true() -> tf.Tensor:
    # Always true, but read from a variable: no pass over the graph can evaluate it.
    return order_token().read_value() >= 0


@functools.cache
def order_token() -> tf.Variable:
    """Return the variable that counts the collectives, and orders them."""
    # On the CPU: a token on a GPU would add a copy to every collective.
    with tf.init_scope(), tf.device("CPU"):
        return mark_internal(tf.Variable(0, trainable=False, dtype=tf.int64))
