"""Models that are sharded over ranks. Importing this package loads TensorFlow."""

# First: it raises one line where the libraries do not fit each other.
from hvdtrain import libraries  # isort: split

from hvdtrain.job.world import MeshShape
from hvdtrain.parallel.attention import (
    ParallelGroupQueryAttention,
    ParallelMultiHeadAttention,
)
from hvdtrain.parallel.dense import ColumnParallelDense, RowParallelDense
from hvdtrain.parallel.distributed_embedding import DistributedEmbedding
from hvdtrain.parallel.dropout import ParallelDropout
from hvdtrain.parallel.embedding import ShardedEmbedding
from hvdtrain.parallel.fully_shard import fully_shard
from hvdtrain.parallel.mesh import Mesh
from hvdtrain.parallel.pipeline import PipelineModel
from hvdtrain.parallel.recomputation import remat
from hvdtrain.parallel.vocabulary import (
    ParallelSparseCategoricalAccuracy,
    ParallelSparseCategoricalCrossentropy,
)
