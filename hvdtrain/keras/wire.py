"""What Horovod's operations can carry, and what has to be settled before them.

Horovod's kernels know some dtypes and not others, report only the last failure of
a group, and cannot be compiled by XLA. Here stands what makes up for it.
"""

import functools

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

# Moved as bits: an allgather, a broadcast or an alltoall computes nothing.
_CARRIERS = {
    tf.bfloat16: tf.uint16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
}
_MOVABLE = (
    tf.bool,
    tf.uint8,
    tf.int8,
    tf.uint16,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.float16,
    tf.float32,
    tf.float64,
)
_SCATTERABLE = (tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)
_REDUCIBLE = (tf.uint8, tf.int8, *_SCATTERABLE)


class BF16Compressor(hvd.compression.Compressor):
    """Sends floating point tensors as bfloat16: float32's range, half its bytes."""

    @staticmethod
    def compress(tensor):
        """Rounds `tensor` to bfloat16; returns it and its original dtype."""
        if tensor.dtype.is_floating:
            return tf.cast(tensor, tf.bfloat16), tensor.dtype
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        """Restores the dtype that `compress` returned as `ctx`."""
        return tf.cast(tensor, ctx)


class Compression(hvd.Compression):
    """Horovod's compressors (`none`, `fp16`) and `bf16`."""

    bf16 = BF16Compressor


def native(value):
    """Returns the TensorFlow object behind `value`.

    Args:
        value: a Keras variable, a TensorFlow variable, tensor or `IndexedSlices`,
            or anything that `tf.convert_to_tensor` takes.
    """
    if isinstance(value, keras.Variable):
        return value.value
    if isinstance(value, tf.IndexedSlices | tf.Variable | tf.Tensor):
        return value
    return tf.convert_to_tensor(value)


def pack(tensor):
    """Returns `tensor` in a dtype that Horovod can move, with the same bits.

    Raises:
        TypeError: for a dtype that has no such twin, strings for one.
    """
    if tensor.dtype in _CARRIERS:
        return tf.bitcast(tensor, _CARRIERS[tensor.dtype])
    _check_dtype(tensor, _MOVABLE, "be moved between ranks")
    return tensor


def unpack(tensor, dtype):
    """Undoes `pack`: returns `tensor` in `dtype`, with the same bits."""
    return tf.bitcast(tensor, dtype) if dtype in _CARRIERS else tensor


def check_has_rows(tensor):
    """Raises a ValueError for a scalar: it has no axis to gather or split."""
    if tensor.shape.rank == 0:
        raise ValueError(
            "Ranks gather and exchange rows: a tensor needs one axis or more. Received "
            "a scalar; pass tf.reshape(value, [1])."
        )


def check_reducible(tensor):
    """Raises a TypeError unless an allreduce can add up `tensor`'s dtype."""
    _check_dtype(tensor, _REDUCIBLE, "be reduced over ranks")


def check_scatterable(tensor):
    """Raises a TypeError unless a reducescatter can add up `tensor`'s dtype."""
    _check_dtype(tensor, _SCATTERABLE, "be reduced and scattered over ranks")


def shape_guard(tensors, *, free_axes=0):
    """An empty tensor whose shape tells the shapes of all `tensors` of a group.

    Of a group, Horovod reports the status of the last tensor alone: where another
    one's shape differs between ranks, uninitialised memory comes back and no error.
    With this one as the last, the difference is in its shape, too.

    Args:
        tensors: non-empty list of tensors of one dtype.
        free_axes: how many leading axes may differ between ranks.

    Returns:
        A tensor without elements: `[0, number of tensors, checksum of shapes]`.
    """
    # A rank that knows a shape when it traces and one that does not must find the
    # same checksum. For shapes that are known, it costs one hash a step.
    shapes = [_shape_text(tensor, free_axes) for tensor in tensors]
    is_known = all(isinstance(shape, str) for shape in shapes)
    joined = ";".join(shapes) if is_known else tf.strings.join(shapes, ";")
    checksum = tf.strings.to_hash_bucket_fast(joined, 2**31 - 1)
    return tf.zeros([0, len(tensors), checksum], tensors[0].dtype)


def operation_name(base, process_set):
    """`base`, made unique among the operations of the graph that is being traced.

    Ranks are matched by the names of operations. Names that Keras gives to layers
    count up with every model that a process has built, and differ between ranks as
    soon as one of them has built a model more. Those counted within one function
    agree, since every rank of the process set traces the same function.
    """
    if process_set.process_set_id:
        # A rank outside of the set does not count its operations.
        base = f"{base}_set{process_set.process_set_id}"
    if tf.executing_eagerly():
        return base
    graph = tf.compat.v1.get_default_graph()
    with graph.name_scope(None):
        return graph.unique_name(base)


def not_folded(tensor):
    """Returns `tensor`; TensorFlow does not see whether it is a constant.

    A collective whose inputs are all constants would be run once, when the graph of a
    function is optimized, and its result be taken for a constant from then on. Horovod
    has not told TensorFlow that other ranks have a say in it.
    """
    if tf.executing_eagerly():
        return tensor
    return tf.where(_true(), tensor, tf.zeros_like(tensor))


def keep(tensor):
    """Has the collective that computes `tensor` run, though nobody uses the result.

    TensorFlow would leave it out, and the other ranks would wait for this one.
    """
    if not tf.executing_eagerly():
        tf.raw_ops.Assert(condition=_true(), data=[tensor])


def in_turn(communicate):
    """Returns `communicate()`; collectives run one after the other, as in Python.

    TensorFlow starts whatever is ready. Two functions, or two calls of one, have
    operations of the same name: those that run side by side would be taken for each
    other on another rank, where they are ready in another order. So each waits for a
    variable that the one before has written; TensorFlow keeps the order of reads and
    writes through functions, branches and loops.
    """
    if tf.executing_eagerly():
        return communicate()
    turn = _turn()
    with tf.control_dependencies([turn.read_value()]):
        results = communicate()
    with tf.control_dependencies(tf.nest.flatten(results, expand_composites=True)):
        done = turn.assign_add(1)
    with tf.control_dependencies([done]):
        return tf.nest.map_structure(tf.identity, results, expand_composites=True)


def _true():
    """True, but only the variable knows: TensorFlow cannot leave out what asks it."""
    return _turn().read_value() >= 0


@functools.cache
def _turn():
    with tf.init_scope(), tf.device("CPU"):
        return tf.Variable(0, trainable=False, dtype=tf.int64)


def check_not_compiled_by_xla():
    """Raises a ValueError inside a function that XLA is going to compile.

    At trace time: XLA itself would fail later, with "No registered OpKernel".
    """
    from tensorflow.python.ops import control_flow_util

    graph = tf.compat.v1.get_default_graph()
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
        graph
    ):
        raise ValueError(
            "Horovod's operations cannot be compiled by XLA. Received a function "
            "with jit_compile=True. Pass jit_compile=False to model.compile() or "
            "tf.function()."
        )


def _shape_text(tensor, free_axes):
    if tensor.shape.rank is not None:
        sizes = tensor.shape[free_axes:]
        if sizes.is_fully_defined():
            return ",".join(map(str, sizes))
    sizes = tf.shape(tensor, out_type=tf.int64)[free_axes:]
    return tf.strings.reduce_join(tf.strings.as_string(sizes), separator=",")


def _check_dtype(tensor, known, purpose):
    if tensor.dtype not in known:
        names = ", ".join(dtype.name for dtype in known)
        raise TypeError(
            f"A tensor of dtype {tensor.dtype.name} cannot {purpose}. Cast it to one "
            f"of {names}."
        )
