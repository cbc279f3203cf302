"""The names of `dist_model_parallel` of NVIDIA Merlin's distributed-embeddings.

    from hvdtrain.parallel import dist_model_parallel as dmp

in place of

    from distributed_embeddings.python.layers import dist_model_parallel as dmp

Tape, optimizer, broadcast and callback are imported from `hvdtrain.keras`; they do not
reduce or broadcast sharded tables.
"""

from hvdtrain.keras import (
    DistributedGradientTape,
    DistributedOptimizer,
    broadcast_variables,
)
from hvdtrain.keras.callbacks import BroadcastGlobalVariablesCallback
from hvdtrain.parallel.distributed_embedding import DistributedEmbedding
from hvdtrain.parallel.embedding import Embedding

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "DistributedEmbedding",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Embedding",
    "broadcast_variables",
]
