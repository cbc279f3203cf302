"""How a script reduces its gradients, noted while its first step is traced."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Concatenate

import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.transport import op_name
from hvdtrain.keras.gradients import GradientReducer, Gradients
from hvdtrain.verify.step_recorder import StepRecorder

_CLIPPING = ("clip_by_value", "clip_by_norm", "clip_by_global_norm")
# What a script may do with a clipped gradient before it is reduced. The gradient of a
# clipped loss goes through others.
_ELEMENTWISE = ("Identity", "Cast", "Mul", "RealDiv", "AddV2")
_MAX_DEPTH = 4


class ClippedTensors:
    """The tensors that functions of TensorFlow have clipped."""

    def __init__(self) -> None:
        # By identity, and kept: the memory of another tensor is not the same.
        self._known: dict[int, Any] = {}

    def add(self, tensors: Any) -> None:
        """Note the result of a function."""
        for each in tf.nest.flatten(tensors):
            values = _values(each)
            self._known[id(values)] = values

    def has_any(self, gradients: Iterable[Any]) -> bool:
        """Return whether one of some gradients was clipped."""
        return any(self._is_clipped(_values(g), _MAX_DEPTH) for g in gradients)

    def _is_clipped(self, tensor: Any, depth: int) -> bool:
        if id(tensor) in self._known:
            return True
        if not depth or not tf.is_symbolic_tensor(tensor):
            return False
        operation = tensor.op
        return operation.type in _ELEMENTWISE and any(
            self._is_clipped(each, depth - 1) for each in operation.inputs
        )


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def note_reductions(recorder: StepRecorder) -> None:
    """Note how gradients are reduced, when a step is traced."""
    reduce, noted = GradientReducer.__call__, recorder.reductions
    clipped = _note_clipping()

    def reduce_and_note(
        self: GradientReducer, gradients: Gradients, variables: list[Any]
    ) -> Gradients:
        reduction = self.options.reduction
        compression = getattr(reduction.compression, "__name__", "")
        if not noted.kinds:
            noted.weights = recorder.digests(variables)
            recorder.graph = tf.compat.v1.get_default_graph()
        noted.names |= {*recorder.names.by_name(variables)}
        noted.kinds.append((op_name(reduction.op), compression))
        is_sparse = any(isinstance(each, tf.IndexedSlices) for each in gradients)
        noted.has_dense_rows |= is_sparse and self.options.sparse_as_dense
        noted.is_clipped |= clipped.has_any(gradients)
        return reduce(self, gradients, variables)

    def note_call(
        collective: Callable[..., Any], values: Any, *args: Any, **kwargs: Any
    ) -> Any:
        tensors = values if isinstance(values, list | tuple) else [values]
        # A scalar is a loss or a metric.
        if any(len(getattr(each, "shape", ())) for each in tensors):
            noted.is_by_script = True
            bound = inspect.signature(collective).bind(values, *args, **kwargs)
            noted.has_sums |= _is_sum(**bound.arguments)
        noted.is_clipped |= clipped.has_any(tensors)
        return collective(values, *args, **kwargs)

    GradientReducer.__call__ = reduce_and_note  # type: ignore[method-assign]
    for name in ("allreduce", "grouped_allreduce"):
        replace_for_script(name, note_call)


def _is_sum(op: object = None, average: object = None, **_: object) -> bool:
    return op == hvd.Sum or (op is None and average is False)


def _note_clipping() -> ClippedTensors:
    """Return the tensors that the script, or Keras for it, clips from now on."""
    clipped = ClippedTensors()

    def replace(name: str) -> None:
        clip = getattr(tf, name)

        @do_not_convert
        @functools.wraps(clip)
        def clip_and_note(*args: Any, **kwargs: Any) -> Any:
            result = clip(*args, **kwargs)
            clipped.add(result)
            return result

        setattr(tf, name, clip_and_note)

    for name in _CLIPPING:
        replace(name)
    return clipped


def replace_for_script(
    name: str, function: Callable[Concatenate[Callable[..., Any], ...], Any]
) -> None:
    """Replace a collective where the script calls it.

    Args:
        function: called with the collective and the arguments of the call.
    """
    collective = getattr(hvd, name)

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = inspect.currentframe().f_back.f_globals["__name__"]  # type: ignore[union-attr]
        if caller.startswith("hvdtrain."):
            # The package's own agreement of the ranks, such as on a checkpoint.
            return collective(*args, **kwargs)
        return function(collective, *args, **kwargs)

    setattr(hvd, name, call)
