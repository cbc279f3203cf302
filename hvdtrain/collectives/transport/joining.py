"""Ranks without data of their own that take part in the collectives of others."""

from concurrent import futures

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.collectives import graph
from hvdtrain.collectives.transport import shared_memory


def join():
    """Blocks until every rank has called it; returns the last rank that did."""
    with tf.init_scope():
        shared_memory.connect()
    return graph.serialize(lambda: tf.py_function(_join, [], tf.int32))


def _join():
    # The other ranks may still reduce through Horovod and natively, in any order.
    with futures.ThreadPoolExecutor(1) as pool:
        last_native = pool.submit(shared_memory.join)
        # The operation is stateless and has no inputs: TensorFlow runs it once for
        # each graph or eager kernel, and returns that result in later calls (constant
        # folding). Hence each call traces a graph of its own, inside a py_function,
        # which is stateful. A concrete function is not counted as retracing.
        last = tf.function(hvd.join, autograph=False).get_concrete_function()()
    # A native reduction does not wait for a cycle of Horovod, which may therefore
    # receive the calls of the ranks in another order.
    return last if last_native.result() is None else last_native.result()
