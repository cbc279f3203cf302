"""What layers derive from their variables, and compute with in their place.

Keras' `Normalization` computes with tensors that its method `finalize_state` makes of
its variables. Keras calls the method in `build`, `adapt` and `load_own_variables`, and
cannot call it where variables are assigned one by one: `refresh` does.
"""

import gc
import inspect
from collections.abc import Iterable

import keras
import tensorflow as tf

from hvdtrain.collectives.dtypes import as_tensorflow

# Of the variables that `finalize_state` reads.
_NAMES = ("mean", "variance")


def refresh(model: keras.layers.Layer) -> None:
    """Derive the state of layers anew, after variables of `model` were assigned.

    Functions that Keras has compiled for such a model are discarded: they hold the old
    tensors as constants.
    """
    layers = [layer for layer in model._flatten_layers() if _derives_state(layer)]
    for layer in layers:
        layer.finalize_state()
    if layers and isinstance(model, keras.Model):
        _discard_functions(model)


def refresh_owners(variables: Iterable[keras.Variable | tf.Variable]) -> None:
    """Derive the state of the layers anew that have these variables.

    A variable has no reference to its layer. So where a name is that of a variable of
    `Normalization`, this looks through all objects of the process, some 0.1 s, for
    layers, and for models that contain them.
    """
    keys = {as_tensorflow(v).ref() for v in variables if _base_name(v) in _NAMES}
    if not keys:
        return
    # Frozen objects are not in the list: layers that were made before gc.freeze().
    gc.unfreeze()
    # By type(): isinstance would load modules that are loaded at their first use.
    layers = [o for o in gc.get_objects() if issubclass(type(o), keras.layers.Layer)]
    # The attribute is missing where __init__ has raised an error.
    for layer in [layer for layer in layers if hasattr(layer, "built")]:
        inside = filter(_derives_state, layer._flatten_layers())
        own = [as_tensorflow(v).ref() for each in inside for v in each.variables]
        if not keys.isdisjoint(own):
            refresh(layer)


def _base_name(variable: keras.Variable | tf.Variable) -> str:
    # TensorFlow's names are "layer/mean:0".
    return variable.name.split("/")[-1].split(":")[0]


def _derives_state(layer: keras.layers.Layer) -> bool:
    # Lookups and Discretization have the method, too: they have no variables, and
    # finalize what `adapt` has counted.
    return hasattr(layer, "finalize_state") and layer.built and bool(layer.weights)


def _discard_functions(model: keras.Model) -> None:
    model.test_function = model.predict_function = None
    # A method of ours stands for it in `training.fit`, which compiles steps later.
    if model.train_function is not None and not inspect.ismethod(model.train_function):
        # Callbacks run after `fit` has made the function that it calls in each step.
        model.make_train_function(force=True)
