"""Tensors between regions of a model that are replicated and divided, as in Megatron.

Inside a model group, each rank computes the same loss. The gradient of a replicated
tensor is therefore that of one rank's loss, unlike that of `hvd.allreduce`, which is
the gradient of the sum of all ranks' losses. The forward and the backward pass are
those of Shoeybi et al. (2019, arXiv:1909.08053):

    mapping               forward         backward
    copy                  identity        allreduce, sum
    reduce                allreduce, sum  identity
    scatter               slice           allgather
    gather                allgather       slice
    gather_for_divided    allgather       reducescatter
    reducescatter         reducescatter   allgather

All take a tensor and a `Partition`, which says along which axis the tensor is divided
and among which ranks.
"""

import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.collectives.transport import Reduction, Sum


def copy(x, partition):
    """Give a replicated tensor to operations that are divided."""
    return _mapped(x, partition, _identity, _allreduce)


def reduce(x, partition):
    """Add up the ranks' parts of a sum, for a replicated consumer."""
    return _mapped(x, partition, _allreduce, _identity)


def scatter(x, partition):
    """Take this rank's slice of a replicated tensor."""
    return _mapped(x, partition, _slice, _allgather)


def gather(x, partition):
    """Put the slices together for a replicated consumer."""
    return _mapped(x, partition, _allgather, _slice)


def gather_for_divided(x, partition):
    """Put the slices together for a consumer that is divided among the same ranks."""
    return _mapped(x, partition, _allgather, _reducescatter)


def reducescatter(x, partition):
    """Add up the ranks' parts of a sum, and take this rank's slice of it."""
    return _mapped(x, partition, _reducescatter, _allgather)


def _mapped(x, partition, forward, backward):
    if not needs_communication(partition.process_set):
        return x

    @tf.custom_gradient
    def mapping(tensor):
        return forward(tensor, partition), lambda upstream: backward(
            upstream, partition
        )

    return mapping(tf.convert_to_tensor(x))


def _identity(x, partition):
    return tf.identity(x)


def _allreduce(x, partition):
    return transport.combine(x, partition.process_set, name="Mapping")


def _slice(x, partition):
    starts, sizes = [0] * x.shape.rank, [-1] * x.shape.rank
    starts[partition.axis] = partition.slice.start
    sizes[partition.axis] = partition.sizes[partition.rank]
    return tf.slice(x, starts, sizes)


def _allgather(x, partition):
    rows = _axis_first(x, partition)
    (gathered,) = transport.allgather(
        [rows], name="MappingGather", process_set=partition.process_set
    )
    return _axis_back(gathered, partition, partition.size)


def _reducescatter(x, partition):
    reduction = Reduction(op=Sum, process_set=partition.process_set)
    (rows,) = transport.reducescatter(
        [_axis_first(x, partition)], reduction, name="MappingScatter"
    )
    return _axis_back(rows, partition, partition.sizes[partition.rank])


def _axis_first(x, partition):
    # Horovod gathers and scatters along the first axis.
    return tf.experimental.numpy.moveaxis(x, partition.axis, 0)


def _axis_back(x, partition, size):
    # Horovod's operations have no static shape on that axis; layers need it.
    x.set_shape([size, *x.shape[1:]])
    return tf.experimental.numpy.moveaxis(x, 0, partition.axis)
