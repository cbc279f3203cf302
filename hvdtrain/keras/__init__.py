"""A drop-in for `horovod.tensorflow.keras` that is right on Keras 3.

Change `import horovod.tensorflow.keras as hvd` to `import hvdtrain.keras as hvd`.
"""

from horovod.tensorflow import (
    ProcessSet,
    add_process_set,
    allgather_object,
    broadcast_object,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

from hvdtrain.keras import callbacks
from hvdtrain.keras.basics import init
from hvdtrain.keras.optimizer import DistributedOptimizer
from hvdtrain.keras.reduction import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allreduce,
    broadcast,
    broadcast_variables,
    grouped_allreduce,
)

__all__ = [name for name in dir() if not name.startswith("_")]
