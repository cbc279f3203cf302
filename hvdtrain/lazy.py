"""Public names of a package that are imported when they are first used."""

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def getattr_of(
    package: str,
    modules: Mapping[str, str],
    *,
    first: str | None = None,
    optional: Collection[str] = (),
) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package.

    A script imports the package before `job.start`, which sets the environment that
    TensorFlow and Horovod read at their import.

    Args:
        modules: the module inside the package that has a name, by name; "" for the
            module of that name.
        first: a module that is imported before these.
        optional: packages that some of the modules need, and that a user installs.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if first:
            importlib.import_module(first)
        try:
            module = importlib.import_module(f"{package}.{modules[name] or name}")
        except ModuleNotFoundError as error:
            if error.name not in optional:
                raise
            remedy = f"{package}.{name} needs {error.name}: pip install {error.name}"
            raise ModuleNotFoundError(remedy, name=error.name) from None
        return getattr(module, name) if modules[name] else module

    return __getattr__
