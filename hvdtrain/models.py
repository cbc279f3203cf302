"""Image classifiers: plain Keras models, which do not depend on ranks.

They take float32 images in [0, 1], (batch, height, width, channels), and return
logits, float32, (batch, num_classes).
"""

import keras
from keras import layers

from hvdtrain.job import JobError


def mlp(image_shape, *, num_classes):
    """One hidden layer of 128 units; 101,770 weights on MNIST."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            _logits(num_classes),
        ],
        name="mlp",
    )


def cnn(image_shape, *, num_classes):
    """Two 3x3 convolutions, pooling, dropout; 1,199,882 weights on MNIST.

    Raises:
        JobError: images smaller than 6x6 leave nothing to pool.
    """
    if min(image_shape[:2]) < 6:
        raise JobError(
            f"Received images of {image_shape[0]}x{image_shape[1]}; the cnn expects "
            "6x6 or more: use the mlp."
        )
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            _logits(num_classes),
        ],
        name="cnn",
    )


def _logits(num_classes):
    # float32 under mixed precision too: the softmax of the loss loses small
    # probabilities in half precision.
    return layers.Dense(num_classes, dtype="float32")


BY_NAME = {"mlp": mlp, "cnn": cnn}
