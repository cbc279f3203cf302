"""Loads TensorFlow and Horovod, after a check that they fit each other.

Packages that need Horovod import this module before any other, since the import of a
Horovod that does not fit raises an error of a page, or ends the process.

Raises:
    MismatchError: a library is missing or does not fit, in one line with the remedy.
"""

import contextlib
import functools
import importlib
import os
import sys
import warnings

from hvdtrain import output
from hvdtrain.install import compatibility
from hvdtrain.install.compatibility import Mismatch, MismatchError


def _load() -> None:
    installed = compatibility.read_installed()
    _raise(compatibility.before_loading(installed, os.environ))
    with contextlib.ExitStack() as stack:
        if "tensorflow" not in sys.modules:
            # Warnings remain: one says that TensorFlow cannot use the GPU.
            os.environ.setdefault(output.LOG_LEVEL, "1")
            stack.enter_context(output.without_noise())
        version = importlib.import_module("tensorflow").__version__
    _raise(compatibility.check_tensorflow(version, installed))
    _raise(compatibility.check_horovod(installed, version))
    with warnings.catch_warnings():
        # Horovod also warns of another patch release of TensorFlow.
        warnings.filterwarnings("ignore", message="Framework tensorflow installed")
        try:
            importlib.import_module("horovod.tensorflow")
        except Exception as error:
            _raise(compatibility.explain(error, installed), error)
            raise


def _raise(mismatch: Mismatch | None, cause: BaseException | None = None) -> None:
    if mismatch:
        raise MismatchError(str(mismatch)) from cause


@functools.cache
def warn_of_doubts(*, is_stall_limit_needed: bool) -> None:
    """Warn of libraries that load, and that were not tested or lack patches.

    Args:
        is_stall_limit_needed: whether several ranks communicate through Gloo.
    """
    installed = compatibility.read_installed()
    versions = {
        name: importlib.import_module(name).__version__
        for name in ("tensorflow", "keras")
    }
    found = compatibility.doubts(installed, **versions)
    if is_stall_limit_needed and (doubt := compatibility.check_stall_limits(installed)):
        found.append(doubt)
    for doubt in found:
        warnings.warn(str(doubt), stacklevel=3)


_load()
