"""Old names of modules, of their contents and of keywords: they work for one version.

Each use of an old name issues a `DeprecationWarning` that has the new name.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

# By old name. An old module has the contents of all its new ones.
MODULES: dict[str, tuple[str, ...]] = {
    "hvdtrain.collectives.environment": ("hvdtrain.environment",),
    "hvdtrain.data.files": ("hvdtrain.data.formats",),
    "hvdtrain.data.sharding": ("hvdtrain.data.sampler",),
    "hvdtrain.job.mesh_shape": ("hvdtrain.job.world",),
    "hvdtrain.models": ("hvdtrain.classifier.models",),
    "hvdtrain.training.exporters": ("hvdtrain.training.exporting",),
    "hvdtrain.training.image_classifier": ("hvdtrain.classifier.experiment",),
    "hvdtrain.training.options": ("hvdtrain.classifier.options",),
}


def getattr_of(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module; `names` has the new name by the old one."""

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return __getattr__


def keyword(
    old: str, new: str
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Return a decorator for a function, one keyword of which was renamed."""

    def decorate(
        function: Callable[Parameters, Returned],
    ) -> Callable[Parameters, Returned]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            if old in kwargs:
                _warn(f"{function.__name__}({old}=)", f"{new}=")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def install() -> None:
    """Make old names of modules importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads a module of an old name, with the contents of the new ones."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave the creation of the module to Python."""

    def exec_module(self, module: types.ModuleType) -> None:
        new = MODULES[module.__name__]
        _warn(module.__name__, " and ".join(new))
        for name in new:
            contents = vars(importlib.import_module(name)).items()
            vars(module).update(
                (key, value)
                for key, value in contents
                # `__getattr__` resolves old names of the contents.
                if not key.startswith("__") or key == "__getattr__"
            )


def _warn(old: str, new: str) -> None:
    # The level attributes the warning to the caller's line.
    warnings.warn(
        f"{old} is deprecated, and is removed in the next version. Use {new}.",
        DeprecationWarning,
        stacklevel=3,
    )
