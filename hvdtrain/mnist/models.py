"""Networks that classify images, plain or sharded over a mesh.

The networks take images of 0 to 255, uint8 or a float, (batch, height, width,
channels), and return logits, float32, (batch, num_classes). Without a `Head` of
parallel layers they are plain Keras models.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
from keras import layers

from hvdtrain import parallel
from hvdtrain.data import Dataset
from hvdtrain.job import JobError
from hvdtrain.mnist.options import ClassifierOptions

ImageShape = tuple[int, int, int]
MakeLayer = Callable[..., keras.layers.Layer]


class Head(NamedTuple):
    """Classes, or functions, that make the dense layers at the end of a classifier.

    Attributes:
        hidden: makes the hidden layer, whose output only the next two layers read.
        dropout: makes the dropout after it, where the model has one.
        logits: makes the last layer.
    """

    hidden: MakeLayer = layers.Dense
    dropout: MakeLayer = layers.Dropout
    logits: MakeLayer = layers.Dense


_KERAS_HEAD = Head()


def mlp(
    image_shape: ImageShape,
    *,
    num_classes: int,
    units: int = 128,
    head: Head = _KERAS_HEAD,
) -> keras.Model:
    """Return a network with one hidden layer: 101,770 weights on MNIST."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Rescaling(1 / 255),
            layers.Flatten(),
            head.hidden(units, activation="relu"),
            logits(num_classes, head.logits),
        ],
        name="mlp",
    )


def cnn(
    image_shape: ImageShape, *, num_classes: int, head: Head = _KERAS_HEAD
) -> keras.Model:
    """Return a network of two 3x3 convolutions: 1,199,882 weights on MNIST.

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
            layers.Rescaling(1 / 255),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Dropout(0.25),
            layers.Flatten(),
            head.hidden(128, activation="relu"),
            head.dropout(0.5),
            logits(num_classes, head.logits),
        ],
        name="cnn",
    )


def logits(num_classes: int, dense: MakeLayer = layers.Dense) -> keras.layers.Layer:
    """Return the last layer of a classifier."""
    # float32 under mixed precision too: the softmax of the loss loses small
    # probabilities in half precision.
    return dense(num_classes, dtype="float32")


BY_NAME: dict[str, Callable[..., keras.Model]] = {"mlp": mlp, "cnn": cnn}


def make(
    options: ClassifierOptions, dataset: Dataset, mesh: parallel.Mesh | None
) -> keras.Model:
    """Return the network of the options, for the images and classes of a data set.

    Args:
        mesh: over which the network is sharded; None for a plain one.

    Raises:
        JobError: the network cannot be sharded over this mesh.
    """
    network = BY_NAME[options.model]
    head = {"head": _sharded_head(mesh)} if mesh and mesh.model.size > 1 else {}
    model = network(dataset.image_shape, num_classes=dataset.num_classes, **head)
    if mesh and mesh.pipeline.size > 1:
        return _pipeline(options, model, mesh)
    return model


def _pipeline(
    options: ClassifierOptions, model: keras.Model, mesh: parallel.Mesh
) -> keras.Model:
    try:
        return parallel.PipelineModel(
            model,
            microbatches=options.microbatches,
            schedule=options.pipeline_schedule,
            mesh=mesh,
        )
    except ValueError as error:
        raise JobError(
            f"Received --model={options.model} and --pipeline_stages="
            f"{options.pipeline_stages}. {error}"
        ) from error


def _sharded_head(mesh: parallel.Mesh) -> Head:
    # No communication between the layers: the shard of the hidden layer that a rank
    # computes is the input of its shard of the last layer.
    return Head(
        hidden=functools.partial(
            parallel.ColumnParallelDense, gather_output=False, mesh=mesh
        ),
        dropout=functools.partial(parallel.ParallelDropout, mesh=mesh),
        logits=functools.partial(
            parallel.RowParallelDense, input_is_parallel=True, mesh=mesh
        ),
    )


def compile_classifier(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    *,
    jit_compile: bool = False,
) -> keras.Model:
    """Compile a model that returns logits, and return it."""
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        jit_compile=jit_compile,
    )
    return model
