"""The TensorFlow operations that set-up compiles from the sources in this directory.

`scripts/build_native.sh` builds them as `lib/libhvdtrain.so` of the Python environment.
What uses them has another way where they are not installed.
"""

import ctypes
import dataclasses
import functools
import pathlib
import sys

import tensorflow as tf

# Of the operations and of the C functions; also in interface.cc.
_INTERFACE = 8


@dataclasses.dataclass(frozen=True)
class Library:
    """The loaded library.

    Attributes:
        operations: the TensorFlow operations, each a Python function.
        functions: the C functions, a `ctypes.CDLL`.
    """

    operations: object
    functions: object


def library_path():
    """Where set-up installs the library."""
    return pathlib.Path(sys.prefix, "lib", "libhvdtrain.so")


@functools.cache
def load():
    """Returns the `Library`.

    Raises:
        OSError: it is missing, or it cannot be loaded, or it is of another version or
            compiled for another TensorFlow.
    """
    if not library_path().exists():
        raise OSError(f"{library_path()} is missing: run scripts/setup.sh")
    try:
        # TensorFlow lists what is registered while it loads the library: before ctypes.
        operations = tf.load_op_library(str(library_path()))
    except tf.errors.OpError as error:
        raise OSError(f"{library_path()}: {error.message}") from None
    functions = ctypes.CDLL(str(library_path()))
    interface = getattr(functions, "hvdtrain_interface", lambda: None)
    if interface() != _INTERFACE:
        raise OSError(f"{library_path()} is of another version: run scripts/setup.sh")
    functions.hvdtrain_tensorflow.restype = ctypes.c_char_p
    compiled_for = functions.hvdtrain_tensorflow().decode()
    if compiled_for != tf.__version__:
        raise OSError(
            f"{library_path()} is compiled for TensorFlow {compiled_for}, and this is "
            f"{tf.__version__}: run scripts/setup.sh"
        )
    return Library(operations, functions)
