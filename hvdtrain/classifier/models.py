"""Image classifiers: plain Keras models, which do not depend on ranks.

They take float32 images in [0, 1], (batch, height, width, channels), and return
logits, float32, (batch, num_classes).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
from keras import layers

import hvdtrain.keras as hvd
from hvdtrain import optimizers, parallel
from hvdtrain.job import JobError


class Head(NamedTuple):
    """What makes the layers of a classifier's dense head: classes of layers.

    Attributes:
        hidden: makes the hidden layer, whose output only the others read.
        dropout: makes its dropout, where the model has one.
        logits: makes the last layer.
    """

    hidden: Callable = layers.Dense
    dropout: Callable = layers.Dropout
    logits: Callable = layers.Dense


_WHOLE = Head()


def mlp(image_shape, *, num_classes, units=128, head=_WHOLE):
    """One hidden layer; 101,770 weights on MNIST with 128 units.

    Args:
        image_shape: height, width, channels.
        num_classes: number of classes.
        units: width of the hidden layer.
        head: its dense layers.
    """
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Flatten(),
            head.hidden(units, activation="relu"),
            _logits(num_classes, head.logits),
        ],
        name="mlp",
    )


def cnn(image_shape, *, num_classes, head=_WHOLE):
    """Two 3x3 convolutions, pooling, dropout; 1,199,882 weights on MNIST.

    Args:
        image_shape: height, width, channels.
        num_classes: number of classes.
        head: its dense layers.

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
            head.hidden(128, activation="relu"),
            head.dropout(0.5),
            _logits(num_classes, head.logits),
        ],
        name="cnn",
    )


def small_cnn(image_shape, *, num_classes):
    """Three 3x3 convolutions, each with pooling; 122,570 weights on 32x32x3 images."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            *_convolution_and_pooling(32),
            *_convolution_and_pooling(64),
            *_convolution_and_pooling(64),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            _logits(num_classes),
        ],
        name="small_cnn",
    )


def _convolution_and_pooling(filters):
    convolution = layers.Conv2D(filters, 3, padding="same", activation="relu")
    return convolution, layers.MaxPooling2D()


def resnet18(image_shape, *, num_classes):
    """ResNet-18 (He et al. 2015), 11,689,512 trainable weights for 1,000 classes."""
    inputs = keras.Input(image_shape)
    x = _convolution(inputs, 64, size=7, strides=2)
    x = layers.ReLU()(x)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    for filters, strides in ((64, 1), (128, 2), (256, 2), (512, 2)):
        x = _residual_block(x, filters, strides=strides)
        x = _residual_block(x, filters, strides=1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, _logits(num_classes)(x), name="resnet18")


def _residual_block(x, filters, *, strides):
    shortcut = x
    if strides > 1 or x.shape[-1] != filters:
        shortcut = _convolution(x, filters, size=1, strides=strides)
    x = layers.ReLU()(_convolution(x, filters, size=3, strides=strides))
    x = _convolution(x, filters, size=3, strides=1)
    return layers.ReLU()(layers.Add()([x, shortcut]))


def _convolution(x, filters, *, size, strides):
    """Convolution and batch normalization, without the bias that this removes."""
    x = layers.Conv2D(filters, size, strides=strides, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


def _logits(num_classes, dense=layers.Dense):
    # float32 under mixed precision too: the softmax of the loss loses small
    # probabilities in half precision.
    return dense(num_classes, dtype="float32")


BY_NAME = {"mlp": mlp, "cnn": cnn, "small_cnn": small_cnn, "resnet18": resnet18}


def build(options, dataset, batch_ranks, mesh):
    """Return the compiled model of the options, with its distributed optimizer.

    Args:
        options: the `Options`.
        dataset: the `Dataset`.
        batch_ranks: factor of the learning rate.
        mesh: the `parallel.Mesh` over which it is divided, or None.

    Raises:
        JobError: it cannot be divided so.
    """
    if options.mixed_precision != "none":
        keras.mixed_precision.set_global_policy(f"mixed_{options.mixed_precision}")
    # In an elastic job it is built more than once.
    keras.utils.set_random_seed(options.seed)
    make_model = BY_NAME[options.model]
    head = {"head": _sharded_head(mesh)} if mesh and mesh.model.size > 1 else {}
    model = make_model(dataset.image_shape, num_classes=dataset.num_classes, **head)
    if mesh and mesh.pipeline.size > 1:
        model = _pipeline(options, model, mesh)
    optimizer = hvd.DistributedOptimizer(
        optimizers.make(
            options.optimizer,
            learning_rate=options.local_learning_rate * batch_ranks,
            accumulation_steps=options.accumulation_steps,
        ),
        compression=getattr(hvd.Compression, options.compression),
        mesh=mesh,
        shard_state=options.shard_optimizer_state,
    )
    return compiled(model, optimizer)


def _pipeline(options, model, mesh):
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


def _sharded_head(mesh):
    """Return what makes the dense layers of a model, over the ranks of a mesh."""
    return Head(
        hidden=functools.partial(
            parallel.ColumnParallelDense, gather_output=False, mesh=mesh
        ),
        dropout=functools.partial(parallel.ParallelDropout, mesh=mesh),
        logits=functools.partial(
            parallel.RowParallelDense, input_is_parallel=True, mesh=mesh
        ),
    )


def compiled(model, optimizer):
    """Compile a classifier that returns logits, and return it."""
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        # XLA cannot compile Horovod's operations.
        jit_compile=False,
    )
    return model
