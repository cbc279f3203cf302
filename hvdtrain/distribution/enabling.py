"""What `keras.distribution` replaces in Keras on TensorFlow."""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.tensorflow import distribution_lib as backend_lib
from keras.src.distribution.distribution_lib import Distribution
from keras.src.trainers.trainer import Trainer

from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.distribution import devices, model_parallel, trainer
from hvdtrain.distribution.devices import Method
from hvdtrain.job.world import JobError
from hvdtrain.keras.seams import replace
from hvdtrain.parallel.creation import shard_when_created

# They call functions that Keras traces once for a model.
_METHODS = (
    *("fit", "evaluate", "predict"),
    *("train_on_batch", "test_on_batch", "predict_on_batch"),
)


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
    has_ranks, has_data_ranks = devices.has_ranks, devices.has_data_ranks
    deal = "distribute_dataset", trainer.distribute_dataset, has_ranks

    def always() -> bool:
        return True

    rows: Any = (
        (Distribution, "__init__", model_parallel.make_distribution, always),
        # One rank has the global batch; but its gradients are dense, as of several.
        # Of this class: loading compiles no model of a class with a `compile` of its
        # own.
        (Trainer, "compile", trainer.compile_distributed, devices.is_active),
        (model, "fit", trainer.fit, has_ranks),
        (model, "train_on_batch", trainer.train_on_batch, has_ranks),
        # Also where no distribution is active any more. Called before the two methods
        # above, which broadcast in the function that it would replace.
        *((model, name, trainer.renew, always) for name in _METHODS),
        (model, "get_metrics_result", trainer.get_metrics_result, has_data_ranks),
        (model, "predict_step", trainer.predict_step, has_data_ranks),
        (normalization, "_moments", trainer.moments, has_data_ranks),
        (keras.distribution.DataParallel, *deal),
        (keras.distribution.ModelParallel, *deal),
    )
    for owner, name, substitute, condition in rows:
        method = _where(condition, getattr(owner, name), substitute)
        replace(owner, name, method, by=enable)
    shard_when_created(model_parallel.choose_shard)


def _where(condition: Callable[[], bool], method: Method, substitute: Any) -> Method:
    """Return a method that is `substitute` of the method where a condition holds."""

    @do_not_convert
    @functools.wraps(method)
    def act(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not condition():
            return method(self, *args, **kwargs)
        return substitute(method, self, *args, **kwargs)

    return act
