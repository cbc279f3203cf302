"""One step of a stage: its operations in the order of the schedule."""

import dataclasses

import tensorflow as tf

from hvdtrain.collectives import graph, transport
from hvdtrain.parallel.pipeline.schedules import Backward, Exchange, Forward


@dataclasses.dataclass(frozen=True)
class Link:
    """The way to a neighbouring stage.

    Attributes:
        process_set: this rank and the neighbour.
        peer: number of the neighbour among them.
        shape: shape of an activation that passes, with None for the batch.
        dtype: its dtype; gradients have it, too.
    """

    process_set: object
    peer: int
    shape: tuple
    dtype: str

    def exchange(self, tensor):
        """Send a tensor or None, and return what the neighbour sends."""
        shape = self.shape[1:]
        rows = tf.zeros((0, *shape), self.dtype) if tensor is None else tensor
        splits = [0, 0]
        splits[self.peer] = tf.shape(rows)[0]
        received, _ = transport.alltoall(
            rows, tf.stack(splits), name="Stages", process_set=self.process_set
        )
        # The neighbour takes part, also where nothing comes back.
        graph.prevent_pruning(received)
        received.set_shape((None, *shape))
        return received


def links(mesh, cuts):
    """Return the `Link` of this rank by the number of the neighbouring stage.

    Args:
        mesh: the `Mesh`.
        cuts: the `Cut` after each stage.
    """
    index, found = mesh.pipeline.index, {}
    if mesh.previous:
        cut = cuts[index - 1]
        found[index - 1] = Link(mesh.previous, 0, cut.shape, cut.dtype)
    if mesh.next:
        cut = cuts[index]
        found[index + 1] = Link(mesh.next, 1, cut.shape, cut.dtype)
    return found


class Execution:
    """Executes the operations of one stage in one step, in eager mode or in a graph.

    TensorFlow starts what has its inputs. Each pass gets control dependencies on the
    one before: otherwise all forward passes could run first, and their activations
    would be in memory together, whatever the schedule.

    Args:
        forward: function (micro-batch, its input) that returns the output and the
            loss of the stage, a scalar or None.
        inputs: inputs of the micro-batches in the first stage, else None.
        stage: number of this stage.
        links: the `Link` by the number of the neighbouring stage.
        variables: the trainable variables.
        scale_loss: function of a loss that returns the one to differentiate.

    Attributes:
        gradients: sums over the micro-batches, in the order of `variables`.
        outputs: output of each micro-batch that has not been sent.
        losses: loss of each micro-batch; empty where the stage has none.
    """

    def __init__(
        self, forward, inputs, *, stage, links, variables=(), scale_loss=tf.identity
    ):
        self._forward = forward
        self._is_first = inputs is not None
        self._inputs = dict(enumerate(inputs or []))
        self._stage = stage
        self._links = links
        self._sources = [variable.value for variable in variables]
        self._scale_loss = scale_loss
        self._tapes = {}
        self._upstream, self._by_input = {}, {}
        self._previous = []
        self.gradients = [None] * len(self._sources)
        self.outputs, self.losses = {}, []

    def run(self, operations):
        """Execute the operations, as `schedules` returns them; returns itself."""
        for operation in operations:
            match operation:
                case Forward(m):
                    self._run_forward(m)
                case Backward(m):
                    self._run_backward(m)
                case Exchange():
                    self._exchange(operation)
        return self

    def _run_forward(self, m):
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

    def _run_backward(self, m):
        tape, x, y, loss = self._tapes.pop(m)
        targets, upstream = [], []
        if m in self._upstream:
            targets.append(y)
            upstream.append(self._after_previous(self._upstream.pop(m)))
        if loss is not None:
            targets.append(loss)
            one = self._after_previous(tf.ones_like(loss))
            upstream.append(self._scale_loss(one))
        by_input, *found = tape.gradient(
            targets, [x, *self._sources], output_gradients=upstream
        )
        if not self._is_first:
            self._by_input[m] = tf.zeros_like(x) if by_input is None else by_input
        self.gradients = list(map(_add, self.gradients, found))
        flat = tf.nest.flatten([by_input, self.gradients], expand_composites=True)
        self._previous = [each for each in flat if each is not None]

    def _exchange(self, operation):
        results, received = self._by_input, self._inputs
        if operation.neighbour > self._stage:
            results, received = self.outputs, self._upstream
        sent = None if operation.sent is None else results.pop(operation.sent)
        tensor = self._links[operation.neighbour].exchange(sent)
        if operation.received is not None:
            received[operation.received] = tensor

    def _after_previous(self, tensor):
        with tf.control_dependencies(self._previous):
            return tf.identity(tensor)


def _add(total, gradient):
    if total is None or gradient is None:
        return gradient if total is None else total
    if isinstance(total, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        # As in the big batch: rows are not added up.
        return tf.IndexedSlices(
            tf.concat([total.values, gradient.values], axis=0),
            tf.concat([total.indices, gradient.indices], axis=0),
            total.dense_shape,
        )
    return tf.convert_to_tensor(total) + tf.convert_to_tensor(gradient)
