"""Networks of synthetic workloads: float32 images in [0, 1] in, logits out."""

import keras
from keras import layers

from hvdtrain.mnist.models import ImageShape, logits


def small_cnn(image_shape: ImageShape, *, num_classes: int) -> keras.Model:
    """Return three 3x3 convolutions with pooling: 122,570 weights on 32x32x3 images."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            *_convolution_and_pooling(32),
            *_convolution_and_pooling(64),
            *_convolution_and_pooling(64),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            logits(num_classes),
        ],
        name="small_cnn",
    )


def _convolution_and_pooling(
    filters: int,
) -> tuple[keras.layers.Layer, keras.layers.Layer]:
    convolution = layers.Conv2D(filters, 3, padding="same", activation="relu")
    return convolution, layers.MaxPooling2D()


def resnet18(image_shape: ImageShape, *, num_classes: int) -> keras.Model:
    """Return ResNet-18 (He et al. 2015): 11,689,512 weights for 1,000 classes."""
    inputs = keras.Input(image_shape)
    x = _convolution(inputs, 64, size=7, strides=2)
    x = layers.ReLU()(x)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    for filters, strides in ((64, 1), (128, 2), (256, 2), (512, 2)):
        x = _residual_block(x, filters, strides=strides)
        x = _residual_block(x, filters, strides=1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, logits(num_classes)(x), name="resnet18")


def _residual_block(
    x: keras.KerasTensor, filters: int, *, strides: int
) -> keras.KerasTensor:
    shortcut = x
    if strides > 1 or x.shape[-1] != filters:
        shortcut = _convolution(x, filters, size=1, strides=strides)
    x = layers.ReLU()(_convolution(x, filters, size=3, strides=strides))
    x = _convolution(x, filters, size=3, strides=1)
    return layers.ReLU()(layers.Add()([x, shortcut]))


def _convolution(
    x: keras.KerasTensor, filters: int, *, size: int, strides: int
) -> keras.KerasTensor:
    # Batch normalization subtracts the mean, and a bias with it.
    x = layers.Conv2D(filters, size, strides=strides, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


BY_NAME = {"small_cnn": small_cnn, "resnet18": resnet18}
