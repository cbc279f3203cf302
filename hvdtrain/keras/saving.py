"""Loading a model with its optimizer distributed again."""

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import h5py
import keras
import numpy as np

from hvdtrain.collectives.dtypes import Compression
from hvdtrain.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: str | os.PathLike | h5py.File,
    custom_optimizers: Iterable[type[keras.optimizers.Optimizer]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type = Compression.none,
    legacy_opts: bool = False,
    **distribution: Any,
) -> keras.Model:
    """Load a saved Keras model and make its optimizer distributed.

    The optimizer keeps the state that was saved (step, momentum, loss scale and so
    on), so that training goes on where it was. A model that was saved without
    `hvdtrain.keras` will do. What the file does not hold is how the optimizer was
    distributed: give the arguments that `DistributedOptimizer` had.

    Args:
        filepath: a `.keras` or `.h5` file, or an open `h5py.File`.
        custom_optimizers: classes of your own that the model may have been compiled
            with.
        custom_objects: classes or functions that the model needs, by name.
        legacy_opts: Horovod's switch to `keras.optimizers.legacy`, which Keras 3
            does not have: True is an error.
        **distribution: further arguments of `DistributedOptimizer`.

    Returns:
        A Keras model, compiled if it was saved so.

    Raises:
        ValueError: for `legacy_opts=True`, and for a file that is not a saved model.
    """
    if legacy_opts:
        raise ValueError(
            "legacy_opts=True selects keras.optimizers.legacy, which Keras 3 does not "
            "have. Compile the model with one of keras.optimizers and save it again."
        )
    objects = {cls.__name__: cls for cls in custom_optimizers or []}
    objects.update(custom_objects or {})
    # Keras selects the format by the ending of the name, and takes no h5py.File.
    filepath = getattr(filepath, "filename", filepath)
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is None:
        return model
    if str(filepath).endswith((".h5", ".hdf5")):
        with h5py.File(filepath) as file, keras.saving.custom_object_scope(objects):
            _restore_optimizer(model, file)
    DistributedOptimizer(model.optimizer, compression=compression, **distribution)
    return model


def _restore_optimizer(model: keras.Model, file: h5py.File) -> None:
    # Keras builds the optimizer of such a file without variables, so that its slots are
    # lost: build an optimizer of the same class for the model's variables.
    values = _optimizer_weights(file)
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    optimizer.build(model.trainable_variables)
    shapes = [tuple(variable.shape) for variable in optimizer.variables]
    if [value.shape for value in values] == shapes:
        for variable, value in zip(optimizer.variables, values, strict=True):
            variable.assign(value)
    elif values:
        warnings.warn(
            f"The optimizer starts without state: {file.filename} holds the state of "
            f"another optimizer than {optimizer.name}, as files of Keras 2 do.",
            stacklevel=3,
        )
    model.optimizer = optimizer


def _optimizer_weights(file: h5py.File) -> list[np.ndarray]:
    if "optimizer_weights" not in file:
        return []
    group = file["optimizer_weights"]
    # Keras splits a list that is too long for one attribute.
    chunks = [group.attrs["weight_names"]] if "weight_names" in group.attrs else []
    while f"weight_names{len(chunks)}" in group.attrs:
        chunks.append(group.attrs[f"weight_names{len(chunks)}"])
    names = [name for chunk in chunks for name in chunk]
    return [group[name][()] for name in names]
