"""What layers derive from their variables, and compute with in their place.

Keras' `Normalization` computes with tensors that its method `finalize_state` makes of
its variables. Keras calls the method in `build`, `adapt` and `load_own_variables`, and
cannot call it where variables are assigned one by one.
"""

import gc
import inspect
from collections.abc import Iterable, Iterator

import keras
import tensorflow as tf

from hvdtrain.collectives.dtypes import as_tensorflow


def refresh(*models: keras.Model) -> None:
    """Derive the state of layers anew, after variables of `models` were assigned.

    Functions that Keras has compiled for such a model are discarded: they hold the old
    tensors as constants.
    """
    for model in models:
        layers = _derived_layers(model)
        for layer in layers:
            layer.finalize_state()
        if layers:
            _discard_functions(model)


def find_models(variables: Iterable[keras.Variable | tf.Variable]) -> list[keras.Model]:
    """Return the models of this process that have layers with derived state.

    Only models with one of these `variables` are returned. A variable has no reference
    to its layer, so this looks through all objects: some 0.1 s.
    """
    keys = {as_tensorflow(variable).ref() for variable in variables}
    # By type(): isinstance would load modules that are loaded at their first use.
    objects = [o for o in gc.get_objects() if issubclass(type(o), keras.Model)]
    # The attribute is missing where __init__ has raised an error.
    models = [model for model in objects if hasattr(model, "built")]
    return [model for model in models if not keys.isdisjoint(_derived_keys(model))]


def _derived_keys(model: keras.Model) -> Iterator[object]:
    for layer in _derived_layers(model):
        yield from (variable.value.ref() for variable in layer.variables)


def _derived_layers(model: keras.Model) -> list[keras.layers.Layer]:
    # Lookups and Discretization have the method, too: they have no variables, and
    # finalize what `adapt` has counted.
    return [
        layer
        for layer in model._flatten_layers()
        if hasattr(layer, "finalize_state") and layer.built and layer.weights
    ]


def _discard_functions(model: keras.Model) -> None:
    model.test_function = model.predict_function = None
    # A method of ours stands for it in `training.fit`, which compiles steps later.
    if model.train_function is not None and not inspect.ismethod(model.train_function):
        # Callbacks run after `fit` has made the function that it calls in each step.
        model.make_train_function(force=True)
