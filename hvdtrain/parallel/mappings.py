"""Mappings of tensors between replicated and sharded regions, as in Megatron.

Inside of a model group, each rank computes the same loss. The gradient of a replicated
tensor is therefore the gradient of one rank's loss; `hvd.allreduce`, by contrast,
computes the gradient of the sum of all ranks' losses. The forward and backward passes
follow Shoeybi et al. (2019, arXiv:1909.08053):

    mapping   forward         backward
    copy      identity        allreduce, sum
    reduce    allreduce, sum  identity
    scatter   local shard     allgather
    gather    allgather       local shard

The `Sharding` argument gives the axis along which the tensor is sharded and the ranks.

A pass that is repeated, to recompute its activations, does not communicate again: the
first one is in `record`, the second one in `replay`.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.sharding.shards import Sharding

_Direction = Callable[[tf.Tensor, Sharding], tf.Tensor]
_Exchange = Callable[[Callable[[], tf.Tensor]], tf.Tensor]

# Runs the collectives of this module in place of a direct call.
_running: contextvars.ContextVar[_Exchange] = contextvars.ContextVar("running")


@contextlib.contextmanager
def record(results: list[tf.Tensor]) -> Iterator[None]:
    """Append the results of the collectives in the block to a list."""

    def run(exchange: Callable[[], tf.Tensor]) -> tf.Tensor:
        results.append(exchange())
        return results[-1]

    with _run_collectives_by(run):
        yield


@contextlib.contextmanager
def replay(results: Sequence[tf.Tensor]) -> Iterator[None]:
    """Take recorded results for the collectives in the block, in their order."""
    recorded = iter(results)
    with _run_collectives_by(lambda _: tf.identity(next(recorded))):
        yield


@contextlib.contextmanager
def _run_collectives_by(run: _Exchange) -> Iterator[None]:
    token = _running.set(run)
    try:
        yield
    finally:
        _running.reset(token)


def copy(x: tf.Tensor, sharding: Sharding) -> tf.Tensor:
    """Pass a replicated tensor to sharded operations."""
    return _apply(x, sharding, _identity, _allreduce)


def reduce(x: tf.Tensor, sharding: Sharding) -> tf.Tensor:
    """Add up the ranks' terms of a sum; the result is replicated."""
    return _apply(x, sharding, _allreduce, _identity)


def scatter(x: tf.Tensor, sharding: Sharding) -> tf.Tensor:
    """Take this rank's shard of a replicated tensor."""
    return _apply(x, sharding, _shard, _allgather)


def gather(x: tf.Tensor, sharding: Sharding) -> tf.Tensor:
    """Concatenate the ranks' shards; the result is replicated."""
    return _apply(x, sharding, _allgather, _shard)


def _apply(
    x: tf.Tensor, sharding: Sharding, forward: _Direction, backward: _Direction
) -> tf.Tensor:
    if not needs_communication(sharding.process_set):
        return x

    @tf.custom_gradient
    def mapping(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        return forward(tensor, sharding), lambda upstream: backward(upstream, sharding)

    return mapping(tf.convert_to_tensor(x))


def _identity(x: tf.Tensor, sharding: Sharding) -> tf.Tensor:
    return tf.identity(x)


def _allreduce(x: tf.Tensor, sharding: Sharding) -> tf.Tensor:
    return _exchange(lambda: transport.combine(x, sharding.process_set, name="Mapping"))


def _shard(x: tf.Tensor, sharding: Sharding) -> tf.Tensor:
    starts, sizes = [0] * x.shape.rank, [-1] * x.shape.rank
    starts[sharding.axis] = sharding.local_slice.start
    sizes[sharding.axis] = sharding.sizes[sharding.rank]
    return tf.slice(x, starts, sizes)


def _allgather(x: tf.Tensor, sharding: Sharding) -> tf.Tensor:
    return _exchange(lambda: _gather_along_axis(x, sharding))


def _gather_along_axis(x: tf.Tensor, sharding: Sharding) -> tf.Tensor:
    # Horovod gathers along the first axis.
    rows = tf.experimental.numpy.moveaxis(x, sharding.axis, 0)
    (gathered,) = transport.allgather(
        [rows], name="MappingGather", process_set=sharding.process_set
    )
    # The result of Horovod's operation has no static shape there; layers need it.
    gathered.set_shape([sharding.size, *gathered.shape[1:]])
    return tf.experimental.numpy.moveaxis(gathered, 0, sharding.axis)


def _exchange(collective: Callable[[], tf.Tensor]) -> tf.Tensor:
    run = _running.get(None)
    return run(collective) if run else collective()
