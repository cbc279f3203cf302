"""Options that are written once: a dataclass whose fields are also flags.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        epochs: int = flag_field(3, "Passes over the data.", low=1)
        data_dir: str | None = path_field("Directory of the data.")

    define_flags(Options)  # at the import of the program
    options = read_flags(Options)  # in its `main`

Importing this module loads no TensorFlow.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from absl import flags

from hvdtrain.job.files import local_path, path_or_address
from hvdtrain.job.world import JobError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# absl lists a flag with the module that defines it: the program, not this one.
flags.disclaim_key_flags()

_T = TypeVar("_T")
_Options = TypeVar("_Options", bound="DataclassInstance")
_DEFINE_BY_TYPE: dict[Any, Callable] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
    Sequence[str]: flags.DEFINE_list,
}


class FlagCheck(NamedTuple):
    """A condition on the values of flags.

    Attributes:
        is_valid: a function whose parameters have the names of the flags.
        message: text of the error, after the names and the values of these flags.
    """

    is_valid: Callable[..., bool]
    message: str


class PathParser(flags.ArgumentParser):
    """Parser of flags that hold a path.

    Expands ~ to the home directory: shells do not, after a "=".

    Args:
        accepts_addresses: also of a store, such as s3://bucket/run.
    """

    syntactic_help = "a path"

    def __init__(self, *, accepts_addresses: bool = False) -> None:
        self._convert = path_or_address if accepts_addresses else local_path

    def parse(self, argument: str) -> str:
        if not argument:
            raise ValueError("expected a path; a variable may be unset")
        try:
            return self._convert(argument)
        except JobError as error:
            raise ValueError(error) from None


def flag_field(
    default: _T,
    text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Iterable[str] = (),
    parser: flags.ArgumentParser | None = None,
) -> _T:
    """Return a field of a dataclass, for `define_flags`.

    The annotation of the field determines the kind of the flag: bool, int, float, str
    or `Sequence[str]`, each with or without `| None`.

    Args:
        default: value of the field and of the flag.
        text: line of --help.
        parser: for a field of another type.
    """
    metadata: dict[str, Any] = {"help": text}
    if low is not None or high is not None:
        metadata |= {"lower_bound": low, "upper_bound": high}
    if choices:
        metadata["enum_values"] = list(choices)
    if parser:
        metadata["parser"] = parser
    return dataclasses.field(default=default, metadata=metadata)


def path_field(text: str, *, accepts_addresses: bool = False) -> str | None:
    """Return a `flag_field` for a path that may be missing."""
    parser = PathParser(accepts_addresses=accepts_addresses)
    return flag_field(None, text, parser=parser)


def define_flags(
    options: type["DataclassInstance"], checks: Iterable[FlagCheck] = ()
) -> None:
    """Define a flag for each field of a dataclass, in the order of the fields.

    Args:
        options: the dataclass; `flag_field` makes its fields.
        checks: conditions that the parsing of the flags verifies.
    """
    annotations = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        default = field.default
        # absl's lists take a default that is a list.
        default = [*default] if isinstance(default, tuple) else default
        define = _definer(annotations[field.name], field.metadata)
        define(name=field.name, default=default, **field.metadata)
    for check in checks:
        _register(check)


def read_flags(options: type[_Options]) -> _Options:
    """Return the dataclass with the values of the flags that were parsed."""
    names = [field.name for field in dataclasses.fields(options)]
    return options(**{name: flags.FLAGS[name].value for name in names})


def _definer(annotation: Any, metadata: Mapping[str, Any]) -> Callable:
    if "parser" in metadata:
        return flags.DEFINE
    if "enum_values" in metadata:
        return flags.DEFINE_enum
    if isinstance(annotation, types.UnionType):
        (annotation,) = {*typing.get_args(annotation)} - {types.NoneType}
    return _DEFINE_BY_TYPE[annotation]


def _register(check: FlagCheck) -> None:
    names = list(inspect.signature(check.is_valid).parameters)
    if len(names) == 1:
        flags.register_validator(names[0], check.is_valid, check.message)
        return

    def validate(values: dict[str, Any]) -> bool:
        if check.is_valid(**values):
            return True
        # absl itself would name defaults too, and without their dashes.
        given = [f"--{n}={values[n]}" for n in names if flags.FLAGS[n].present]
        raise flags.IllegalFlagValueError(f"flags {', '.join(given)}: {check.message}")

    flags.register_multi_flags_validator(names, validate)
