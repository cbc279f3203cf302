"""The TensorFlow operations that set-up compiles from the sources in this directory.

`scripts/build_native.sh` builds them as a library in `lib/` of the Python environment.
What uses them has another way where they are not installed.
"""

import ctypes
import dataclasses
import functools
import pathlib
import sys

import tensorflow as tf

# Of the operations and of the C functions; also in interface.cc.
_INTERFACE = 9


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
    """Where set-up installs the library for this TensorFlow.

    TensorFlow has no stable ABI. To load a library that was compiled for another one
    may end the process, so the version is in the name.
    """
    name = f"libhvdtrain-tensorflow-{tf.__version__}.so"
    return pathlib.Path(sys.prefix, "lib", name)


@functools.cache
def load():
    """Returns the `Library`.

    Raises:
        OSError: it is missing, or it cannot be loaded, or it is of another version.
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
    return Library(operations, functions)
