"""Layers that a verification leaves out: what they draw depends on the batch."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras.src.layers.preprocessing.image_preprocessing.base_image_preprocessing_layer import (  # noqa: E501
    BaseImagePreprocessingLayer,
)

from hvdtrain.keras.seams import replace


def left_out_layers(layers: Iterable[keras.layers.Layer]) -> Iterator[str]:
    """Yield the kinds of layers that are left out, with their names."""
    layers = list(layers)
    augmenting = [x for x in layers if isinstance(x, BaseImagePreprocessingLayer)]
    for kind, found in (
        ("dropout", list(filter(_drops, layers))),
        ("augmentation", augmenting),
    ):
        if found:
            yield f"{kind} ({', '.join(sorted({layer.name for layer in found}))})"


def _drops(layer: keras.layers.Layer) -> bool:
    """Return whether `leave_out_dropout` changes a layer."""
    # Of recurrent layers and of attention.
    rate = getattr(layer, "dropout", 0.0)
    is_dropout = isinstance(layer, keras.layers.Dropout)
    return bool(layer.rate if is_dropout else isinstance(rate, float) and rate)


def leave_out_dropout() -> None:
    """Make all layers of dropout return their inputs: masks are drawn for a batch."""
    replace(
        keras.src.backend.random,
        "dropout",
        lambda inputs, rate, noise_shape=None, seed=None: inputs,
        by=leave_out_dropout,
    )


def leave_out_augmentation() -> None:
    """Make layers that change images at random return them, as in an evaluation."""
    augment = BaseImagePreprocessingLayer.call

    @functools.wraps(augment)
    def call(self: Any, data: Any, training: bool = True) -> Any:
        return augment(self, data, training=False)

    replace(BaseImagePreprocessingLayer, "call", call, by=leave_out_augmentation)
