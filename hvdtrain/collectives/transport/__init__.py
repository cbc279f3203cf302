"""How tensors move between ranks: the only package that calls Horovod's operations.

A list of tensors is sorted once, by (sparse, dtype), into buckets, and each bucket is
one communication. Callers do not depend on Horovod's operations.
"""

from hvdtrain.collectives.transport.allreduce import allreduce, combine
from hvdtrain.collectives.transport.alltoall import alltoall
from hvdtrain.collectives.transport.connection import disconnect, reduction_path
from hvdtrain.collectives.transport.flat_shards import (
    gather_shards,
    reduce_to_shards,
)
from hvdtrain.collectives.transport.moving import (
    allgather,
    allgather_bytes,
    broadcast,
    broadcast_all,
    broadcast_in_place,
    join,
    reducescatter,
)
from hvdtrain.collectives.transport.reduction import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Reduction,
    Sum,
    check_compression,
    op_name,
)
