"""What `keras.distribution` replaces in Keras on TensorFlow."""

import functools
from typing import Any

import horovod.tensorflow as hvd
import keras
from keras.src.backend.tensorflow import distribution_lib as backend_lib
from keras.src.distribution.distribution_lib import Distribution
from keras.src.trainers.trainer import Trainer

from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.distribution import devices, trainer
from hvdtrain.distribution.devices import Method
from hvdtrain.job.world import JobError
from hvdtrain.keras.seams import replace


@functools.cache
def enable() -> None:
    """Make `keras.distribution` work on TensorFlow, with one device for each process.

    Replaces functions of Keras and methods of its classes, once. The methods act where
    a distribution is active: after `keras.distribution.set_distribution`, or in its
    `scope()`. Call it before a distribution is made.

    Raises:
        JobError: Keras runs on another backend.
    """
    if keras.backend.backend() != "tensorflow":
        raise JobError(
            f"Received the backend {keras.backend.backend()!r}; expected 'tensorflow'. "
            "On JAX, keras.distribution works without hvdtrain.distribution.enable()."
        )
    for name, function in (
        ("initialize", devices.initialize),
        ("num_processes", devices.num_processes),
        ("process_id", devices.process_id),
        ("list_devices", devices.list_devices),
        ("get_device_count", devices.get_device_count),
        ("distribute_tensor", devices.distribute_tensor),
        ("_to_backend_mesh", devices.to_backend_mesh),
        ("_to_backend_layout", devices.to_backend_layout),
    ):
        replace(backend_lib, name, function, by=enable)
    model, normalization = keras.Model, keras.layers.BatchNormalization
    data_parallel = keras.distribution.DataParallel
    for owner, name, substitute, ranks in (
        (Distribution, "__init__", devices.make_distribution, 0),
        # One rank has the global batch; but its gradients are dense, as of several.
        # Of this class: loading compiles no model of a class with a `compile` of its
        # own.
        (Trainer, "compile", trainer.compile_distributed, 1),
        (model, "fit", trainer.fit, 2),
        (model, "train_on_batch", trainer.train_on_batch, 2),
        (model, "get_metrics_result", trainer.get_metrics_result, 2),
        (model, "predict_step", trainer.predict_step, 2),
        (normalization, "_moments", trainer.moments, 2),
        (data_parallel, "distribute_dataset", trainer.distribute_dataset, 2),
    ):
        method = _where(ranks, getattr(owner, name), substitute)
        replace(owner, name, method, by=enable)


def _where(ranks: int, method: Method, substitute: Any) -> Method:
    """Return `substitute` of the method, with so many ranks or more."""

    @do_not_convert
    @functools.wraps(method)
    def act(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ranks and (devices.active() is None or hvd.size() < ranks):
            return method(self, *args, **kwargs)
        return substitute(method, self, *args, **kwargs)

    return act
