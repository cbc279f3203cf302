"""One step of a stage: its operations in the order of the schedule."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf
from horovod.tensorflow import ProcessSet

from hvdtrain.collectives import graph, transport
from hvdtrain.parallel.mesh import Mesh
from hvdtrain.parallel.pipeline.schedules import Backward, Exchange, Forward, Operation
from hvdtrain.parallel.pipeline.splitting import Cut

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


@dataclasses.dataclass(frozen=True)
class Link:
    """The connection to a neighbouring stage.

    Attributes:
        process_set: this rank and the neighbour.
        peer: position of the neighbour in the process set.
        shape: shape of the activations between the stages, with None for the batch.
        dtype: dtype of the activations and of their gradients.
    """

    process_set: ProcessSet
    peer: int
    shape: tuple[int | None, ...]
    dtype: str

    def exchange(self, tensor: tf.Tensor | None) -> tf.Tensor:
        """Send a tensor or None, and return the tensor that the neighbour sends."""
        shape = self.shape[1:]
        rows = tf.zeros((0, *shape), self.dtype) if tensor is None else tensor
        splits = [0, 0]
        splits[self.peer] = tf.shape(rows)[0]
        received, _ = transport.alltoall(
            rows, tf.stack(splits), name="Stages", process_set=self.process_set
        )
        # Keep this operation although its result is unused where the neighbour sends
        # nothing: the neighbour blocks in it.
        graph.prevent_pruning(received)
        received.set_shape((None, *shape))
        return received


def make_links(mesh: Mesh, cuts: Sequence[Cut]) -> dict[int, Link]:
    """Return the `Link`s of this rank by stage; `cuts` has the `Cut` after each."""
    index, links = mesh.pipeline.index, {}
    if mesh.previous:
        cut = cuts[index - 1]
        links[index - 1] = Link(mesh.previous, 0, cut.shape, cut.dtype)
    if mesh.next:
        cut = cuts[index]
        links[index + 1] = Link(mesh.next, 1, cut.shape, cut.dtype)
    return links


class Execution:
    """Executes the operations of one stage in one step, in eager mode or in a graph.

    TensorFlow starts an operation when its inputs are there. Each pass gets control
    dependencies on the pass before: otherwise all forward passes could run first, and
    their activations would be in memory together, whatever the schedule.

    Args:
        forward: function of the number and the input of a micro-batch, which returns
            the output and the loss of the stage, a scalar or None.
        inputs: inputs of the micro-batches in the first stage, else None.
        stage: number of this stage.
        links: the `Link` by the number of the neighbouring stage.
        variables: the trainable variables.
        scale_loss: returns the scaled loss, which is differentiated.

    Attributes:
        gradients: sums over the micro-batches, in the order of `variables`.
        outputs: outputs that have not been sent, by the number of the micro-batch.
        losses: loss of each micro-batch; empty if the stage has none.
    """

    def __init__(
        self,
        forward: Callable[[int, tf.Tensor], tuple[tf.Tensor, tf.Tensor | None]],
        inputs: Sequence[tf.Tensor] | None,
        *,
        stage: int,
        links: Mapping[int, Link],
        variables: Sequence[keras.Variable] = (),
        scale_loss: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
    ) -> None:
        self._forward = forward
        self._is_first = inputs is not None
        self._inputs = dict(enumerate(inputs or []))
        self._stage = stage
        self._links = links
        self._sources = [variable.value for variable in variables]
        self._scale_loss = scale_loss
        # By the number of the micro-batch, until the next operation takes them.
        self._tapes: dict[int, tuple] = {}
        self._upstream: dict[int, tf.Tensor] = {}
        self._input_gradients: dict[int, tf.Tensor] = {}
        # Outputs of the pass before.
        self._previous: list[tf.Tensor] = []
        self.gradients: list[Gradient] = [None] * len(self._sources)
        self.outputs: dict[int, tf.Tensor] = {}
        self.losses: list[tf.Tensor] = []

    def run(self, operations: Iterable[Operation]) -> "Execution":
        """Execute the operations of a schedule, and return this object."""
        for operation in operations:
            match operation:
                case Forward(m):
                    self._run_forward(m)
                case Backward(m):
                    self._run_backward(m)
                case Exchange():
                    self._exchange(operation)
        return self

    def _run_forward(self, m: int) -> None:
        x = self._after_previous(self._inputs.pop(m))
        with tf.GradientTape() as tape:
            if not self._is_first:
                tape.watch(x)
            y, loss = self._forward(m, x)
        if self._sources:
            self._tapes[m] = tape, x, y, loss
        self.outputs[m] = y
        self._previous = [y] if loss is None else [y, loss]
        self.losses += self._previous[1:]

    def _run_backward(self, m: int) -> None:
        tape, x, y, loss = self._tapes.pop(m)
        targets, upstream = [], []
        if m in self._upstream:
            targets.append(y)
            upstream.append(self._after_previous(self._upstream.pop(m)))
        if loss is not None:
            targets.append(loss)
            one = self._after_previous(tf.ones_like(loss))
            upstream.append(self._scale_loss(one))
        by_input, *by_variable = tape.gradient(
            targets, [x, *self._sources], output_gradients=upstream
        )
        if not self._is_first:
            by_input = tf.zeros_like(x) if by_input is None else by_input
            self._input_gradients[m] = by_input
        self.gradients = list(map(_add, self.gradients, by_variable))
        flat = tf.nest.flatten([by_input, self.gradients], expand_composites=True)
        self._previous = [tensor for tensor in flat if tensor is not None]

    def _exchange(self, operation: Exchange) -> None:
        results, received = self._input_gradients, self._inputs
        if operation.neighbour > self._stage:
            results, received = self.outputs, self._upstream
        sent = None if operation.sent is None else results.pop(operation.sent)
        tensor = self._links[operation.neighbour].exchange(sent)
        if operation.received is not None:
            received[operation.received] = tensor

    def _after_previous(self, tensor: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(self._previous):
            return tf.identity(tensor)


def _add(total: Gradient, gradient: Gradient) -> Gradient:
    if total is None or gradient is None:
        return gradient if total is None else total
    if isinstance(total, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        # Concatenate, as one tape does for the whole batch: the optimizer or the hook
        # adds up the rows that repeat.
        return tf.IndexedSlices(
            tf.concat([total.values, gradient.values], axis=0),
            tf.concat([total.indices, gradient.indices], axis=0),
            total.dense_shape,
        )
    return tf.convert_to_tensor(total) + tf.convert_to_tensor(gradient)
