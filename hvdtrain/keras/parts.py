"""Tensors inside of a model of which each rank has a part.

A divided layer has the attributes `takes_parts` and `gives_parts`: whether its inputs
and its outputs are such parts. Between two of them may stand what computes each element
by itself.
"""

from typing import NamedTuple

import keras

_ELEMENTWISE_LAYERS = (
    keras.layers.Activation,
    keras.layers.Add,
    keras.layers.Average,
    keras.layers.ELU,
    keras.layers.Identity,
    keras.layers.LeakyReLU,
    keras.layers.Maximum,
    keras.layers.Minimum,
    keras.layers.Multiply,
    keras.layers.ReLU,
    keras.layers.Rescaling,
    keras.layers.Subtract,
)
# Classes of the functions of keras.ops, which are not public.
_ELEMENTWISE_OPERATIONS = {
    *("Abs", "Absolute", "Add", "Cast", "Celu", "Clip", "Divide", "DivideNoNan"),
    *("Elu", "Erf", "Exp", "Expm1", "Gelu", "HardSigmoid", "HardSilu", "HardTanh"),
    *("LeakyRelu", "Log", "Log1p", "LogSigmoid", "Maximum", "Minimum", "Multiply"),
    *("Negative", "Power", "Reciprocal", "Relu", "Relu6", "Rsqrt", "Selu", "Sigmoid"),
    *("Sign", "Silu", "Softplus", "Softsign", "Sqrt", "Square", "Squareplus"),
    *("Subtract", "Tanh", "TanhShrink", "TrueDivide"),
}
NOT_ELEMENTWISE_ACTIVATIONS = (
    keras.activations.log_softmax,
    keras.activations.softmax,
)


class _Tensor(NamedTuple):
    """What is known of a tensor; None in its place where nothing is.

    Attributes:
        is_part: whether each rank has a part, or all have the whole.
        giver: the layer that has made it so.
    """

    is_part: bool
    giver: object


def check_parts(model):
    """Raises a ValueError if a part of a tensor is taken for the whole, or conversely.

    It follows the tensors of functional and sequential models. What a subclassed model
    or layer makes of a part is not known.

    Args:
        model: a `keras.Model`.
    """
    graph = _graph_of(model)
    if graph is None:
        return
    inputs = [
        _Tensor(False, tensor._keras_history.operation) for tensor in graph.inputs
    ]
    outputs = _follow(graph, inputs)
    if len(outputs) == 1 and outputs[0] and outputs[0].is_part:
        _check_scores(model, outputs[0].giver)


def _graph_of(model):
    """Returns a functional model; None for what is neither that nor sequential."""
    graph = getattr(model, "_functional", model)
    is_graph = isinstance(graph, keras.Model) and hasattr(graph, "_nodes_by_depth")
    return graph if is_graph else None


def _follow(graph, inputs):
    """Returns the `_Tensor` of each output of a functional model."""
    known = dict(zip(map(id, graph.inputs), inputs, strict=False))
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if node.input_tensors:
                given = [known.get(id(tensor)) for tensor in node.input_tensors]
                made = _outputs_of(node.operation, given, len(node.output_tensors))
                known.update(zip(map(id, node.output_tensors), made, strict=False))
    return [known.get(id(tensor)) for tensor in graph.outputs]


def _outputs_of(operation, given, count):
    inner = _graph_of(operation)
    if inner is not None:
        return _follow(inner, given)
    is_wrapper = isinstance(operation, keras.layers.Wrapper)
    return [_output_of(operation.layer if is_wrapper else operation, given)] * count


def _output_of(layer, given):
    part = next((tensor for tensor in given if tensor and tensor.is_part), None)
    is_divided = hasattr(layer, "takes_parts")
    if part:
        _check_takes_part(layer, part.giver)
    elif is_divided and layer.takes_parts and all(given):
        _raise_takes_whole(layer, given[0].giver)
    if is_divided:
        return _Tensor(layer.gives_parts, layer)
    if not _is_keras_own(layer) or not all(given):
        return part if part and _is_elementwise(layer) else None
    if _is_elementwise(layer):
        return part or given[0]
    return _Tensor(False, layer)


def _is_elementwise(layer):
    if isinstance(layer, _ELEMENTWISE_LAYERS):
        activation = getattr(layer, "activation", None)
        return activation not in NOT_ELEMENTWISE_ACTIVATIONS
    is_layer = isinstance(layer, keras.layers.Layer)
    return not is_layer and type(layer).__name__ in _ELEMENTWISE_OPERATIONS


def _is_keras_own(value):
    # Not by __class__: a divided layer has that of its dense twin.
    is_own = type(value).__module__.startswith("keras.")
    return is_own and not isinstance(value, keras.layers.Lambda)


def _check_takes_part(layer, giver):
    is_divided = hasattr(layer, "takes_parts")
    if layer.takes_parts if is_divided else _is_elementwise(layer):
        return
    if not is_divided and not _is_keras_own(layer):
        return
    raise ValueError(
        f"The {_text(layer)} takes a whole tensor, and each rank has a part of its "
        f"input: the {_text(giver)} has gather_output=False. Expected between that and "
        "a RowParallelDense with input_is_parallel=True: elementwise layers, "
        "ParallelDropout, or layers of your own. Pass gather_output=True, or move the "
        "layer."
    )


def _raise_takes_whole(layer, giver):
    raise ValueError(
        f"The {_text(layer)} takes this rank's part of a tensor, and its input is the "
        f"whole output of the {_text(giver)}. Give that gather_output=False, if it is "
        "a ColumnParallelDense, or use the layer for whole inputs: "
        "input_is_parallel=False, or Dropout for ParallelDropout."
    )


def _check_scores(model, giver):
    """Raises a ValueError if a loss or metric of Keras would be that of a part."""
    metrics = getattr(getattr(model, "_compile_metrics", None), "_user_metrics", None)
    for each in keras.tree.flatten([getattr(model, "loss", None), metrics]):
        if isinstance(each, str) or _is_keras_own(each):
            raise ValueError(
                f"The model returns this rank's part of the output of the "
                f"{_text(giver)}, and a loss or metric of Keras takes the whole. "
                f"Received: {each!r}. Pass gather_output=True, or "
                "parallel.ParallelSparseCategoricalCrossentropy(from_logits=True) and "
                "ParallelSparseCategoricalAccuracy."
            )


def _text(layer):
    return f"{type(layer).__name__} {layer.name!r}"
