"""Which errors of TensorFlow and Horovod mean that another rank was lost."""

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

# How the native library begins the reason: kernel.cc.
NATIVE_FAILURE = "A collective has lost a rank"


def is_collective_failure(error):
    """Returns whether `error` is that of a collective whose job has lost a rank.

    TensorFlow raises it as an error like any other. Horovod's operations are
    identified by their kernel ("Op:Horovod..."), by the file in which a node of a
    graph was defined, or by Horovod's text at shutdown; never by the node's name,
    which is the user's. Ranks that disagree, about a shape for instance, raise another
    error.
    """
    if isinstance(error, HorovodInternalError):
        return True
    signs = (
        "Op:Horovod",
        "horovod/tensorflow/mpi_ops",
        "Horovod has been shut",
        NATIVE_FAILURE,
    )
    return isinstance(error, (tf.errors.UnknownError, tf.errors.AbortedError)) and any(
        sign in str(error) for sign in signs
    )
