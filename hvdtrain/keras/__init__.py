"""A drop-in for `horovod.tensorflow.keras` that is right on Keras 3.

Change `import horovod.tensorflow.keras as hvd` to `import hvdtrain.keras as hvd`.
"""

# First: it raises one line where the libraries do not fit each other.
from hvdtrain import libraries  # isort: split

from horovod.tensorflow import (
    ProcessSet,
    add_process_set,
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
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    remove_process_set,
    rocm_built,
    size,
    size_op,
    stop_timeline,
)

from hvdtrain.collectives.dtypes import Compression
from hvdtrain.collectives.objects import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
)
from hvdtrain.collectives.ops import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from hvdtrain.collectives.transport import Adasum, Average, Max, Min, Product, Sum
from hvdtrain.job.backend import init, shutdown, start_timeline
from hvdtrain.keras import callbacks, elastic
from hvdtrain.keras.layers import SyncBatchNormalization
from hvdtrain.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvdtrain.keras.saving import load_model
from hvdtrain.keras.tape import DistributedGradientTape, PartialDistributedGradientTape
from hvdtrain.keras.variables import broadcast_global_variables, broadcast_variables

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
