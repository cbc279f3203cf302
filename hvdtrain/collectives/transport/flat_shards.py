"""Tensors of which each rank holds or receives a part: slices of the flattened tensor.

The parts of a list of tensors move as one flat buffer for each dtype; in the memory of
one node without it.
"""

import functools

import tensorflow as tf

from hvdtrain.collectives import dtypes, graph
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.collectives.transport import moving, shared_memory
from hvdtrain.collectives.transport.signature import Signature


def gather_shards(parts, sizes, shapes, *, name, process_set=global_process_set):
    """Returns whole tensors from all ranks' parts of them.

    Args:
        parts: list of tensors, this rank's part of each.
        sizes: list of the elements of each rank, for each tensor.
        shapes: list of the shapes of the whole tensors, None for those that this rank
            does not need.
        name: of the operations.
        process_set: the ranks.

    Returns:
        List of tensors, None for those that are not needed.
    """
    results = [None] * len(parts)
    parts = dtypes.as_tensors(parts)
    for places in dtypes.partition(parts):
        part_lists = [[each[i] for i in places] for each in (parts, sizes, shapes)]
        is_native = shared_memory.gathers(parts[places[0]].dtype, process_set)
        exchange = _gather_natively if is_native else _gather_flat
        gathered = exchange(*part_lists, name=name, process_set=process_set)
        for i, tensor in zip(places, gathered, strict=True):
            results[i] = None if shapes[i] is None else tensor
    return results


def reduce_to_shards(tensors, sizes, reduction, *, name):
    """Reduces tensors over the ranks, and returns this rank's flat part of each.

    Args:
        tensors: list of dense tensors.
        sizes: list of the elements of each rank, for each tensor.
        reduction: a `Reduction`.
        name: of the operations.
    """
    compressed = [reduction.compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in compressed]
    results = [None] * len(sent)
    for places in dtypes.partition(sent):
        bucket = [sent[i] for i in places]
        is_native = shared_memory.covers(bucket[0], reduction)
        exchange = _scatter_natively if is_native else _scatter_flat
        parts = exchange(bucket, [sizes[i] for i in places], reduction, name=name)
        for i, part in zip(places, parts, strict=True):
            results[i] = reduction.compression.decompress(part, compressed[i][1])
    return results


def _scatter_natively(tensors, sizes, reduction, *, name):
    scaled = [dtypes.scaled(tensor, reduction.prescale_factor) for tensor in tensors]
    exchange = functools.partial(
        shared_memory.reducescatter, scaled, sizes, reduction=reduction
    )
    parts = _run_natively(exchange, tensors, name, reduction.process_set)
    return [dtypes.scaled(part, reduction.postscale_factor) for part in parts]


def _gather_natively(parts, sizes, shapes, *, name, process_set):
    exchange = functools.partial(
        shared_memory.allgather, parts, sizes=sizes, shapes=shapes
    )
    return _run_natively(exchange, parts, name, process_set)


def _run_natively(exchange, tensors, name, process_set):
    graph.check_not_compiled_by_xla()
    name = graph.operation_name(name, process_set)
    return moving.run(
        functools.partial(exchange, name=name),
        Signature("exchange of parts", tensors),
        name=name,
        process_set=process_set,
        is_compared=True,
    )


def _gather_flat(parts, sizes, shapes, *, name, process_set):
    flat = tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)
    (gathered,) = moving.allgather([flat], name=name, process_set=process_set)
    # A rank that needs none of the tensors takes part for the others.
    graph.prevent_pruning(gathered)
    by_rank = list(zip(*sizes, strict=True))
    pieces = tf.split(gathered, [size for rank in by_rank for size in rank])
    count = len(parts)
    return [
        tf.reshape(_joined(pieces[i::count], sizes[i]), shape)
        if shape is not None
        else None
        for i, shape in enumerate(shapes)
    ]


def _joined(pieces, sizes):
    held = [piece for piece, size in zip(pieces, sizes, strict=True) if size]
    # A split shares the memory of its input, a concatenation copies.
    return held[0] if len(held) == 1 else tf.concat(held, axis=0)


def _scatter_flat(tensors, sizes, reduction, *, name):
    # The parts of each rank are one block of a flat buffer. Horovod divides it into
    # equal lengths, up to which blocks are filled.
    by_rank = list(zip(*sizes, strict=True))
    length = max(map(sum, by_rank))
    split = [
        tf.split(tf.reshape(tensor, [-1]), each)
        for tensor, each in zip(tensors, sizes, strict=True)
    ]
    blocks = []
    for rank, counts in enumerate(by_rank):
        blocks += [pieces[rank] for pieces in split]
        blocks.append(tf.zeros([length - sum(counts)], tensors[0].dtype))
    sent = tf.concat(blocks, axis=0)
    (mine,) = moving.reducescatter([sent], reduction, name=name)
    mine.set_shape([length])
    counts = by_rank[reduction.process_set.rank()]
    return tf.split(mine, [*counts, length - sum(counts)])[:-1]
