"""Flat shards of tensors: gathered into full tensors, or received from a reduction.

A flat shard is a slice of the flattened tensor. The shards of a list of tensors move in
one flat buffer for each dtype, and in native reductions without a buffer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from hvdtrain.collectives import dtypes, graph
from hvdtrain.collectives.process_sets import ProcessSet, global_process_set
from hvdtrain.collectives.transport import moving, native_reduction
from hvdtrain.collectives.transport.reduction import Reduction
from hvdtrain.collectives.transport.signature import Signature

# The number of elements of a tensor that each rank holds, by rank.
SizesByRank = Sequence[int]
Shape: TypeAlias = Sequence[int] | tf.TensorShape


def gather_shards(
    shards: Sequence[tf.Tensor],
    sizes: Sequence[SizesByRank],
    shapes: Sequence[Shape | None],
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor | None]:
    """Return full tensors, gathered from the flat shards of all ranks. A collective.

    Args:
        shards: this rank's shard of each tensor.
        sizes: for each tensor, the elements of each rank.
        shapes: shape of each full tensor; None for a tensor that this rank does not
            need, whose result is None.
    """
    results: list[tf.Tensor | None] = [None] * len(shards)
    tensors = dtypes.as_tensors(shards)
    for indices in dtypes.buckets(tensors):
        is_native = native_reduction.gathers(tensors[indices[0]].dtype, process_set)
        exchange = _gather_natively if is_native else _gather_flat
        gathered = exchange(
            [tensors[i] for i in indices],
            [sizes[i] for i in indices],
            [shapes[i] for i in indices],
            name=name,
            process_set=process_set,
        )
        for i, tensor in zip(indices, gathered, strict=True):
            results[i] = None if shapes[i] is None else tensor
    return results


def reduce_to_shards(
    tensors: Sequence[tf.Tensor],
    sizes: Sequence[SizesByRank],
    reduction: Reduction,
    *,
    name: str,
) -> list[tf.Tensor]:
    """Reduce dense tensors, and return this rank's flat shard of each. A collective.

    `sizes` are as in `gather_shards`; the tensors have equal shapes on all ranks.
    """
    sent, contexts = reduction.prepare(tensors)
    results: list[tf.Tensor] = [None] * len(sent)
    for indices in dtypes.buckets(sent):
        bucket = [sent[i] for i in indices]
        is_native = native_reduction.covers(bucket[0], reduction)
        exchange = _scatter_natively if is_native else _scatter_flat
        shards = exchange(bucket, [sizes[i] for i in indices], reduction, name=name)
        for i, shard in zip(indices, shards, strict=True):
            results[i] = shard
    return reduction.finish(results, contexts)


def _scatter_natively(
    tensors: list[tf.Tensor],
    sizes: list[SizesByRank],
    reduction: Reduction,
    *,
    name: str,
) -> list[tf.Tensor]:
    exchange = functools.partial(
        native_reduction.reducescatter, tensors, sizes, reduction=reduction
    )
    return _run_natively(exchange, tensors, name, reduction.process_set)


def _gather_natively(
    shards: list[tf.Tensor],
    sizes: list[SizesByRank],
    shapes: list[Shape | None],
    *,
    name: str,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    exchange = functools.partial(
        native_reduction.allgather, shards, sizes=sizes, shapes=shapes
    )
    return _run_natively(exchange, shards, name, process_set)


def _run_natively(
    exchange: Callable[..., list[tf.Tensor]],
    tensors: list[tf.Tensor],
    name: str,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    name = graph.operation_name(name, process_set)
    return moving.run(
        functools.partial(exchange, name=name),
        Signature("exchange of shards", tensors),
        name=name,
        process_set=process_set,
        is_compared=True,
    )


def _gather_flat(
    shards: list[tf.Tensor],
    sizes: list[SizesByRank],
    shapes: list[Shape | None],
    *,
    name: str,
    process_set: ProcessSet,
) -> list[tf.Tensor | None]:
    flat = tf.concat([tf.reshape(shard, [-1]) for shard in shards], axis=0)
    (gathered,) = moving.allgather([flat], name=name, process_set=process_set)
    # The other ranks block in it if a rank that needs no tensor prunes it.
    graph.prevent_pruning(gathered)
    sizes_by_rank = zip(*sizes, strict=True)
    split = tf.split(gathered, [size for on_rank in sizes_by_rank for size in on_rank])
    return [
        tf.reshape(_concatenate(split[i :: len(shards)], sizes[i]), shape)
        if shape is not None
        else None
        for i, shape in enumerate(shapes)
    ]


def _concatenate(shards: list[tf.Tensor], sizes: SizesByRank) -> tf.Tensor:
    held = [shard for shard, size in zip(shards, sizes, strict=True) if size]
    # A split shares the memory of its input, a concatenation copies.
    return held[0] if len(held) == 1 else tf.concat(held, axis=0)


def _scatter_flat(
    tensors: list[tf.Tensor],
    sizes: list[SizesByRank],
    reduction: Reduction,
    *,
    name: str,
) -> list[tf.Tensor]:
    # The shards of each rank are one block of a flat buffer. Horovod splits the buffer
    # into equal lengths: shorter blocks are padded with zeros.
    sizes_by_rank = list(zip(*sizes, strict=True))
    length = max(map(sum, sizes_by_rank))
    split = [
        tf.split(tf.reshape(tensor, [-1]), list(by_rank))
        for tensor, by_rank in zip(tensors, sizes, strict=True)
    ]
    blocks: list[tf.Tensor] = []
    for rank, counts in enumerate(sizes_by_rank):
        blocks += [shards[rank] for shards in split]
        blocks.append(tf.zeros([length - sum(counts)], tensors[0].dtype))
    sent = tf.concat(blocks, axis=0)
    (block,) = moving.reduce_rows([sent], reduction, name=name)
    block.set_shape([length])
    counts = sizes_by_rank[reduction.process_set.rank()]
    return tf.split(block, [*counts, length - sum(counts)])[:-1]
