"""Libraries that some sources need, and that are not installed with the package."""

import importlib
from typing import Any

from hvdtrain.data.formats import DataError


def load(module: str, extra: str) -> Any:
    """Return a module of a library that is installed by an extra of the package.

    Raises:
        DataError: it is not installed, or it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise DataError(
            f"{module.partition('.')[0]} is not installed: pip install "
            f"'hvdtrain[{extra}]'."
        ) from None
    except ImportError as error:
        raise DataError(
            f"Cannot import {module}: {str(error).splitlines()[0]}; expected the "
            f"version of hvdtrain[{extra}]: install it again."
        ) from None
