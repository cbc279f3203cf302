"""Layers of a stage that are divided over the axis model of the pipeline's mesh.

The config of such a layer is that of its dense twin: a stage makes them from the layers
of the dense model.
"""

import math

from hvdtrain.keras.dense_values import DenseVariable
from hvdtrain.keras.partition import is_divided
from hvdtrain.parallel.layer import InModelGroup


def check(layer, mesh):
    """Raise a ValueError for a layer that is divided, and that no stage can make."""
    if _is_made(layer, mesh) or not is_divided(layer.variables):
        return
    raise ValueError(
        f"The {type(layer).__name__} {layer.name!r} cannot be part of a pipeline, "
        "which makes layers from their config: its weights are divided, and not over "
        "the axis model of the pipeline's mesh, or those of a layer inside of it are."
    )


def dense_size(operation):
    """Return the number of parameters of a layer's dense twin: equal on all ranks.

    It is 0 for an operation of Keras, such as an addition, which is no layer.
    """
    variables = getattr(operation, "variables", [])
    return sum(math.prod(DenseVariable.of(variable).shape) for variable in variables)


def makers(functional, mesh):
    """Return, by a registered name, what Keras calls as the class of a divided layer.

    Args:
        functional: the dense model, with divided layers.
        mesh: the `Mesh` of the pipeline.
    """
    made = [layer for layer in functional.layers if _is_made(layer, mesh)]
    return {_name(layer.name): _Maker(layer, mesh) for layer in made}


def with_maker(entry, makers):
    """Return an entry of a config, with the registered name if it has a maker."""
    name = _name(entry["name"])
    if name not in makers:
        return entry
    # It is built by its call: the shapes of its build are those of the dense twin.
    kept = {key: value for key, value in entry.items() if key != "build_config"}
    return kept | {"registered_name": name}


def _is_made(layer, mesh):
    return isinstance(layer, InModelGroup) and layer.is_of(mesh)


class _Maker:
    def __init__(self, layer, mesh):
        self._layer = layer
        self._mesh = mesh

    def from_config(self, _):
        return self._layer.remade(self._mesh)


def _name(layer_name):
    return f"divided>{layer_name}"
