"""Data parallelism in one process: several devices, one Python.

`mirrored` is TensorFlow's MirroredStrategy: each device has a copy of the weights, and
gradients are reduced among them. `split` is the older way that other frameworks call
DataParallel: the weights are on the first device; each step copies them to the others,
every device computes the gradients of its share of the batch, and the first device adds
them up and updates the weights.
"""

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.benchmark import variants
from hvdtrain.benchmark.benchmark_options import BenchmarkOptions
from hvdtrain.benchmark.variants import Variant
from hvdtrain.benchmark.workloads import Workload
from hvdtrain.job import JobError
from hvdtrain.keras.seams import replace

# Inputs, a tensor or a nest of tensors, and targets of a batch.
Batch = tuple[Any, tf.Tensor]
Logs = dict[str, tf.Tensor]


def make_devices(options: BenchmarkOptions) -> list[str]:
    """Return the names of the devices. CPU devices are logical: they share the cores.

    Call it before TensorFlow runs its first operation, which creates the devices.

    Raises:
        JobError: there are fewer GPUs than `options.devices`, but some.
    """
    if options.strategy == "single":
        return [""]
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and len(gpus) < options.devices:
        raise JobError(
            f"Received --devices={options.devices} with {len(gpus)} GPUs; expected at "
            "most as many: CUDA_VISIBLE_DEVICES= measures on the CPU."
        )
    if gpus:
        tf.config.set_visible_devices(gpus[: options.devices], "GPU")
        return [f"/gpu:{i}" for i in range(options.devices)]
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * options.devices
    tf.config.set_logical_device_configuration(cpu, logical)
    return [f"/cpu:{i}" for i in range(options.devices)]


def build(
    options: BenchmarkOptions, workload: Workload, names: Sequence[str]
) -> keras.Model:
    """Return the workload's model, compiled for the devices `names`."""
    if options.strategy == "mirrored":
        strategy = tf.distribute.MirroredStrategy(names)
        with strategy.scope():
            return workload.build(len(names))
    with tf.device(names[0]):
        model = workload.build(len(names))
    if options.strategy == "split":
        # On the instance: the model may be of any class, also of a user's.
        step = types.MethodType(_split_step(names), model)
        replace(model, "train_step", step, by=build)
    return model


def _split_step(names: Sequence[str]) -> Callable[[keras.Model, Batch], Logs]:
    def train_step(model: keras.Model, data: Batch) -> Logs:
        shards = _shard(data, len(names))
        with tf.GradientTape() as tape:
            outputs = [
                _forward(model, name, *shard)
                for name, shard in zip(names, shards, strict=True)
            ]
            loss = tf.add_n([loss for loss, _ in outputs]) / len(names)
        variables = [variable.value for variable in model.trainable_variables]
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        model._loss_tracker.update_state(loss)
        x, y = data
        predictions = tf.concat([prediction for _, prediction in outputs], axis=0)
        return model.compute_metrics(x, y, predictions)

    return train_step


def _forward(
    model: keras.Model, name: str, x: Any, y: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the loss and the predictions, computed on a device."""
    with tf.device(name):
        predictions = model(x, training=True)
        return model.compute_loss(x=x, y=y, y_pred=predictions), predictions


def _shard(data: Batch, count: int) -> Iterator[Batch]:
    shards = [tf.split(tensor, count) for tensor in tf.nest.flatten(data)]
    for shard in zip(*shards, strict=True):
        yield tf.nest.pack_sequence_as(data, shard)


def independent_models(workload: Workload, names: Sequence[str]) -> keras.Model:
    """Return a model whose step trains a copy on each device, without communication."""
    copies = []
    for name in names:
        with tf.device(name):
            copies.append(workload.build(len(names)))
            copies[-1].optimizer.build(copies[-1].trainable_variables)
    steps = [copy.train_step for copy in copies]

    def train_step(model: keras.Model, data: Batch) -> Logs:
        shards = _shard(data, len(names))
        logs = []
        for name, step, shard in zip(names, steps, shards, strict=True):
            with tf.device(name):
                logs.append(step(shard))
        return logs[0]

    step = types.MethodType(train_step, copies[0])
    replace(copies[0], "train_step", step, by=independent_models)
    # The step of the first copy holds references to the others.
    return copies[0]


def compared_variants(
    model: keras.Model,
    workload: Workload,
    options: BenchmarkOptions,
    names: Sequence[str],
) -> dict[str, Variant]:
    """Return the variants that the training is compared with, by name."""
    count = len(names)
    constant = workload.constant_batches(count)
    batches = constant
    if options.strategy == "mirrored":
        batches = model.distribute_strategy.experimental_distribute_dataset(constant)
    steps = options.steps_per_execution
    measured = {"function": variants.function_variant(model, batches, steps)}
    if workload.batches:
        measured["constant"] = variants.fit_variant(
            model, workload.constant_input(count), options
        )
    with tf.device(names[0]) if count > 1 else contextlib.nullcontext():
        plain = workload.build()
    if count > 1:
        measured["local"] = variants.function_variant(
            independent_models(workload, names), constant, steps
        )
        measured["alone"] = variants.fit_variant(
            plain, workload.input(options), options
        )
    measured["bare"] = variants.fit_variant(plain, workload.constant_input(), options)
    return measured
