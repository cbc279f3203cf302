"""Data parallelism in one process: several devices, one Python.

`mirrored` is TensorFlow's MirroredStrategy: each device has a copy of the weights, and
gradients are reduced among them. `split` is the older way that other frameworks call
DataParallel: the weights are on the first device; each step copies them to the others,
every device computes the gradients of its part of the batch, and the first device adds
them up and updates the weights.
"""

import contextlib
import types

import tensorflow as tf

from hvdtrain.job import JobError
from hvdtrain.keras.seams import replace
from hvdtrain.measurement import variants


def devices(options):
    """Return the names of the devices, of which CPUs are made by dividing one.

    To be called before TensorFlow runs its first operation.

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
    parts = [tf.config.LogicalDeviceConfiguration()] * options.devices
    tf.config.set_logical_device_configuration(cpu, parts)
    return [f"/cpu:{i}" for i in range(options.devices)]


def build(options, workload, names):
    """Return the workload's model, compiled for the devices `names`."""
    if options.strategy == "mirrored":
        strategy = tf.distribute.MirroredStrategy(names)
        with strategy.scope():
            return workload.build(len(names))
    with tf.device(names[0]):
        model = workload.build(len(names))
    if options.strategy == "split":
        # An attribute of the instance: a subclass could not be of any Keras model.
        step = types.MethodType(_split_step(names), model)
        replace(model, "train_step", step, by=build)
    return model


def _split_step(names):
    def train_step(model, data):
        parts = _parts(data, len(names))
        with tf.GradientTape() as tape:
            outputs = [
                _on_device(model, name, *part)
                for name, part in zip(names, parts, strict=True)
            ]
            loss = tf.add_n([loss for loss, _ in outputs]) / len(names)
        variables = [variable.value for variable in model.trainable_variables]
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        model._loss_tracker.update_state(loss)
        x, y = data
        predictions = tf.concat([each for _, each in outputs], axis=0)
        return model.compute_metrics(x, y, predictions)

    return train_step


def _on_device(model, name, x, y):
    with tf.device(name):
        predictions = model(x, training=True)
        return model.compute_loss(x=x, y=y, y_pred=predictions), predictions


def _parts(data, count):
    x, y = data
    return zip(tf.split(x, count), tf.split(y, count), strict=True)


def independent(workload, names):
    """Return a model whose step trains a copy on each device, without communication."""
    copies = []
    for name in names:
        with tf.device(name):
            copies.append(workload.build(len(names)))
            copies[-1].optimizer.build(copies[-1].trainable_variables)
    steps = [copy.train_step for copy in copies]

    def train_step(model, data):
        logs = []
        for name, step, part in zip(
            names, steps, _parts(data, len(names)), strict=True
        ):
            with tf.device(name):
                logs.append(step(part))
        return logs[0]

    step = types.MethodType(train_step, copies[0])
    replace(copies[0], "train_step", step, by=independent)
    # They are referred to by the step of the first.
    return copies[0]


def train(model, input_fn, options, *, callbacks=()):
    """Return the variant of `fit` with the real input."""
    return variants.fitted(
        model, input_fn, options, callbacks=lambda steps: list(callbacks)
    )


def others(model, workload, options, names):
    """Return the variants that the training is compared with, by name."""
    count = len(names)
    constant = workload.constant_batches(count)
    batches = constant
    if options.strategy == "mirrored":
        batches = model.distribute_strategy.experimental_distribute_dataset(constant)
    measured = {"function": variants.called(model, batches, options)}
    if workload.batches:

        def constant_input(start, end):
            return constant.take(end - start)

        measured["constant"] = variants.fitted(model, constant_input, options)
    with tf.device(names[0]) if count > 1 else contextlib.nullcontext():
        plain = workload.build()
    if count > 1:
        measured["local"] = variants.called(
            independent(workload, names), constant, options
        )
        measured["alone"] = variants.fitted(plain, workload.input(options), options)
    measured["bare"] = variants.bare(plain, workload, options)
    return measured
