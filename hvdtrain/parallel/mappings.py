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

All take a tensor and a `Sharding`, which says along which axis the tensor is divided
and among which ranks.
"""

import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.collectives.transport import Reduction, Sum


def copy(x, sharding):
    """Give a replicated tensor to operations that are divided."""
    return _mapped(x, sharding, _identity, _allreduce)


def reduce(x, sharding):
    """Add up the ranks' parts of a sum, for a replicated consumer."""
    return _mapped(x, sharding, _allreduce, _identity)


def scatter(x, sharding):
    """Take this rank's slice of a replicated tensor."""
    return _mapped(x, sharding, _slice, _allgather)


def gather(x, sharding):
    """Put the slices together for a replicated consumer."""
    return _mapped(x, sharding, _allgather, _slice)


def gather_for_divided(x, sharding):
    """Put the slices together for a consumer that is divided among the same ranks."""
    return _mapped(x, sharding, _allgather, _reducescatter)


def reducescatter(x, sharding):
    """Add up the ranks' parts of a sum, and take this rank's slice of it."""
    return _mapped(x, sharding, _reducescatter, _allgather)


def _mapped(x, sharding, forward, backward):
    if not needs_communication(sharding.process_set):
        return x

    @tf.custom_gradient
    def mapping(tensor):
        return forward(tensor, sharding), lambda upstream: backward(upstream, sharding)

    return mapping(tf.convert_to_tensor(x))


def _identity(x, sharding):
    return tf.identity(x)


def _allreduce(x, sharding):
    return transport.combine(x, sharding.process_set, name="Mapping")


def _slice(x, sharding):
    starts, sizes = [0] * x.shape.rank, [-1] * x.shape.rank
    starts[sharding.axis] = sharding.local_slice.start
    sizes[sharding.axis] = sharding.sizes[sharding.rank]
    return tf.slice(x, starts, sizes)


def _allgather(x, sharding):
    rows = _axis_first(x, sharding)
    (gathered,) = transport.allgather(
        [rows], name="MappingGather", process_set=sharding.process_set
    )
    return _axis_back(gathered, sharding, sharding.size)


def _reducescatter(x, sharding):
    reduction = Reduction(op=Sum, process_set=sharding.process_set)
    (rows,) = transport.reducescatter(
        [_axis_first(x, sharding)], reduction, name="MappingScatter"
    )
    return _axis_back(rows, sharding, sharding.sizes[sharding.rank])


def _axis_first(x, sharding):
    # Horovod gathers and scatters along the first axis.
    return tf.experimental.numpy.moveaxis(x, sharding.axis, 0)


def _axis_back(x, sharding, size):
    # Horovod's operations have no static shape on that axis; layers need it.
    x.set_shape([size, *x.shape[1:]])
    return tf.experimental.numpy.moveaxis(x, 0, sharding.axis)
