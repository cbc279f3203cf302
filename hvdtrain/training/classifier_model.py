"""The model of an image classifier, which may be divided over ranks."""

import functools

import keras

import hvdtrain.keras as hvd
from hvdtrain import optimizers, parallel
from hvdtrain.classifier import models
from hvdtrain.job import JobError


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
    make_model = models.BY_NAME[options.model]
    head = {"head": _divided_head(mesh)} if mesh and mesh.model.size > 1 else {}
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


def _divided_head(mesh):
    """Return what makes the dense layers of a model, over the ranks of a mesh."""
    return models.Head(
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
