"""Processes, devices and layouts: what `keras.distribution` asks of its backend.

A device is a rank, and a process has one device: "cpu:3" is that of rank 3.
"""

import functools
import os
import secrets
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.name_scope import current_path

from hvdtrain.job import backend, declared_size, platforms
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.job.world import JobError, World
from hvdtrain.parallel.mesh import Axes, Axis, Mesh

# A method of Keras.
Method: TypeAlias = Callable[..., Any]


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Start Horovod, and give all ranks one seed. A collective.

    The processes find each other by the variables of their launcher or platform. The
    arguments are compared with the job.
    """
    # ModelParallel adds the process sets of its mesh.
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    backend.init()
    world = backend.world()
    with fail_together(world):
        check_arguments(world, job_addresses, num_processes, process_id)
        backend.select_gpu(world)
    # As on JAX: without a seed of the user, the ranks' weights would differ.
    seed = global_state.get_global_attribute("global_random_seed")
    seeds = gather(world, (seed, secrets.randbelow(1 << 31)))
    if None in dict(seeds):
        given, drawn = seeds[0]
        keras.utils.set_random_seed(drawn if given is None else given)


def check_arguments(
    world: World, addresses: str | None, processes: int | None, process_id: int | None
) -> None:
    """Raise a JobError for arguments of `initialize` that are not those of the job."""
    # One address is that of the coordinator.
    listed = addresses.count(",") + 1 if addresses and "," in addresses else None
    for name, received, expected in (
        ("num_processes", processes, world.size),
        ("the number of job_addresses", listed, world.size),
        ("process_id", process_id, world.rank),
    ):
        if received not in (None, expected):
            raise JobError(
                f"Received {name}={received} in keras.distribution.initialize; "
                f"expected {expected}, as in the job of this process. Leave out these "
                "arguments and the variables KERAS_DISTRIBUTION_*, and start N "
                "processes by a launcher: horovodrun -np N python script.py."
            )


def num_processes() -> int:
    """Return the number of ranks; 1 in a process that is no part of a job.

    Raises:
        JobError: the process is one of several, and Horovod has not been started.
    """
    if hvd.is_initialized():
        return hvd.size()
    if os.environ.get("HVDTRAIN_ALONE") != "1":
        declared = declared_size.read(os.environ) or platforms.read(os.environ)
        if declared and declared.size > 1:
            raise JobError(
                f"Received {declared.variable} of {declared.size} processes, which are "
                "not connected. Call keras.distribution.initialize() before devices "
                "are listed and a distribution is made."
            )
    return 1


def process_id() -> int:
    """Return the rank of this process."""
    return hvd.rank() if hvd.is_initialized() else 0


def list_devices(device_type: str | None = None) -> list[str]:
    """Return "cpu:0", "cpu:1", ..., one device for each rank; with GPUs "gpu:0"..."""
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    kind = (device_type or ("gpu" if has_gpu else "cpu")).lower()
    if not tf.config.list_physical_devices(kind.upper()):
        return []
    return [f"{kind}:{rank}" for rank in range(num_processes())]


def get_device_count(device_type: str | None = None) -> int:
    """Return the number of ranks, if their hosts have devices of this type."""
    return len(list_devices(device_type))


def to_backend_mesh(device_mesh: keras.distribution.DeviceMesh) -> np.ndarray:
    """Return the ranks of a mesh, in its shape.

    Raises:
        JobError: its devices are not those of all ranks, each once.
    """
    names = [str(device) for device in device_mesh.devices.flatten()]
    kind = names[0].partition(":")[0]
    devices = list_devices(kind)
    if sorted(names) != sorted(devices):
        raise JobError(
            f"Received a mesh of {len(names)} devices, {', '.join(names):.80}, in a "
            f"job of {num_processes()} ranks; expected one device of one kind for each "
            f"rank: {', '.join(list_devices()):.80}. Leave out devices=... to use all."
        )
    ranks = [int(name.partition(":")[2]) for name in names]
    return np.reshape(ranks, device_mesh.devices.shape)


def to_backend_layout(
    tensor_layout: keras.distribution.TensorLayout,
) -> tuple[np.ndarray, tuple[str | None, ...]]:
    """Return the ranks of the layout's mesh, and the mesh axis of each tensor axis."""
    if tensor_layout.device_mesh is None:
        raise ValueError(
            "A layout without a device mesh has no ranks. Received: "
            f"{tensor_layout!r}. Pass device_mesh=... to TensorLayout."
        )
    return tensor_layout.device_mesh.backend_mesh, tensor_layout.axes


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Return `tensor`: activations are not sharded. Warn once of each layout."""
    is_sharded = any(getattr(layout, "axes", None) or ())
    if is_sharded and has_ranks() and hvd.rank() == 0:
        path = current_path()
        rule = f"{path}/output"
        # Keras calls this function with the layout of such a rule.
        if active().get_tensor_layout(rule) is layout:
            name = f"the layout map for {rule!r}"
        else:
            name = f"keras.distribution.distribute_tensor in {path or 'the script'!r}"
        _warn_of_layout(name, tuple(layout.axes))
    return tensor


@functools.cache
def _warn_of_layout(name: str, axes: tuple[str | None, ...]) -> None:
    warnings.warn(
        f"Received the layout {axes} by {name}, which has no effect on TensorFlow: "
        "activations are not sharded, and take as much memory as without it. Layouts "
        "of weights have an effect; parallel.remat saves memory of activations.",
        stacklevel=4,
    )


def layout_of(variable: keras.Variable) -> keras.distribution.TensorLayout | None:
    """Return the layout of a variable in the active distribution, if there is one."""
    distribution = active()
    return distribution.get_variable_layout(variable) if distribution else None


def active() -> Any:
    """Return the distribution that is set, or None, also before `initialize`."""
    return keras.distribution.distribution() if hvd.is_initialized() else None


def active_mesh() -> Mesh | Axes | None:
    """Return the mesh of ranks of the active distribution; None for one process."""
    return getattr(active(), "_hvdtrain_mesh", None)


def data_axis() -> Axis:
    """Return the ranks that get different samples under the active distribution."""
    mesh = active_mesh()
    return mesh.data if mesh else Axes().data


def is_active() -> bool:
    """Return whether a distribution is active."""
    return active() is not None


def has_ranks() -> bool:
    """Return whether one is active in a job of several ranks."""
    return is_active() and hvd.size() > 1


def has_data_ranks() -> bool:
    """Return whether one is active that deals samples to several ranks."""
    return is_active() and data_axis().size > 1
