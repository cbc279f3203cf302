"""Tensors inside of a model of which each rank has a part.

A divided layer has the attributes `takes_parts` and `gives_parts`: whether its inputs
and its outputs are such parts.
"""

import keras

_ELEMENTWISE = (
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
    keras.layers.Subtract,
)
# Those without weights; their seeds are replicated, or they read the last axis.
_OF_WHOLE_TENSORS = (
    keras.layers.AlphaDropout,
    keras.layers.Dropout,
    keras.layers.Flatten,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.LayerNormalization,
    keras.layers.Softmax,
    keras.layers.UnitNormalization,
)
NOT_ELEMENTWISE_ACTIVATIONS = (
    keras.activations.log_softmax,
    keras.activations.softmax,
)


def check_parts(model):
    """Raises a ValueError for a layer that takes a part for the whole tensor, or back.

    It follows the tensors of a functional or sequential model. What a subclassed model
    does, and what a layer of one's own makes of a part, is not known.

    Args:
        model: a `keras.Model`.
    """
    graph = getattr(model, "_functional", model)
    if not isinstance(graph, keras.Model) or not hasattr(graph, "_nodes_by_depth"):
        return
    # The layer that gives the part, or the whole, by the tensor.
    parts, wholes = {}, {}
    for node in _in_order(graph):
        layer, inputs = node.operation, list(map(id, node.input_tensors))
        part = _first(parts, inputs)
        if part is not None:
            _check_takes_part(layer, part)
        elif _takes_parts(layer) and set(inputs) <= wholes.keys():
            _raise_takes_whole(layer, wholes[inputs[0]])
        if getattr(layer, "gives_parts", False):
            given, giver = parts, part or layer
        elif _is_elementwise(layer):
            whole = _first(wholes, inputs)
            given, giver = (wholes, whole) if part is None else (parts, part)
        else:
            given, giver = wholes, layer if _needs_whole(layer) else None
        if giver is not None:
            given.update(dict.fromkeys(map(id, node.output_tensors), giver))
    _check_losses(model, [_first(parts, [id(tensor)]) for tensor in graph.outputs])


def _in_order(graph):
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if node.input_tensors:
                yield node


def _first(found, keys):
    return next((found[key] for key in keys if key in found), None)


def _takes_parts(layer):
    return getattr(layer, "takes_parts", False)


def _is_elementwise(layer):
    activation = getattr(layer, "activation", None)
    return (
        isinstance(layer, _ELEMENTWISE)
        and activation not in NOT_ELEMENTWISE_ACTIVATIONS
    )


def _needs_whole(layer):
    """Whether it is known that the inputs and outputs of a layer are whole tensors."""
    if hasattr(layer, "takes_parts"):
        return not layer.takes_parts
    is_layer = isinstance(layer, keras.layers.Layer) and _is_keras_own(layer)
    # Nested models and wrappers may pass parts on to layers that take them.
    if not is_layer or isinstance(layer, keras.Model | keras.layers.Wrapper):
        return False
    has_softmax = isinstance(layer, _ELEMENTWISE) and not _is_elementwise(layer)
    return has_softmax or isinstance(layer, _OF_WHOLE_TENSORS) or bool(layer.variables)


def _is_keras_own(value):
    # Not by __class__: a divided layer has that of its dense twin.
    return type(value).__module__.startswith("keras.")


def _check_takes_part(layer, giver):
    if _takes_parts(layer) or not _needs_whole(layer):
        return
    raise ValueError(
        f"The {_text(layer)} computes with the whole last axis of its input, of which "
        f"each rank has a part: the {_text(giver)} has gather_output=False. Expected: "
        "elementwise layers, ParallelDropout, and in the end RowParallelDense with "
        "input_is_parallel=True. Pass gather_output=True, or move the layer."
    )


def _raise_takes_whole(layer, giver):
    raise ValueError(
        f"The {_text(layer)} takes this rank's part of a tensor, and its input is the "
        f"whole output of the {_text(giver)}. Give that gather_output=False, if it is "
        "a ColumnParallelDense, or use the layer for whole inputs: "
        "input_is_parallel=False, or Dropout for ParallelDropout."
    )


def _check_losses(model, givers):
    """Raises a ValueError if Keras' own loss would be computed from a part."""
    loss = getattr(model, "loss", None)
    if loss is None or len(givers) != 1 or givers[0] is None:
        return
    is_own = isinstance(loss, str) or _is_keras_own(loss)
    if is_own:
        raise ValueError(
            f"The model returns this rank's part of the output of the "
            f"{_text(givers[0])}, and the loss of Keras needs the whole. Received: "
            f"loss={loss!r}. Pass gather_output=True, or the loss "
            "parallel.ParallelSparseCategoricalCrossentropy(from_logits=True)."
        )


def _text(layer):
    return f"{type(layer).__name__} {layer.name!r}"
