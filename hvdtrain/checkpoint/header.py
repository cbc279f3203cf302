"""What is in a checkpoint: a header, which is JSON, and arrays by name.

The names of arrays are `prefix/number/path`, `shared/0003/dense/kernel` for example:
numbers are the order of the variables, since two variables may have the same path.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict, TypeVar

import numpy as np

from hvdtrain.job import JobError

# Written once, as full values:
SHARED = "shared"  # trained weights and the optimizer's state; replicated or sharded
TABLES = (
    "tables"  # sharded over replicas: frozen tables, sums of gradients of all tables
)
REPLICATED = "replicated"  # other variables, if all replicas have equal values
STORED_ONCE = (SHARED, TABLES, REPLICATED)
# Written for each replica of the model, with its number:
RANK = "rank{}"  # other variables: seeds, accumulated gradients, moving statistics ...
METRICS = "metrics{}"  # the states of metrics
RANDOM = "random{}"  # states of global random generators; `random0/python` for example
# Written for each rank, with its number; an array that equals rank 0's only once:
CALLBACKS = "callbacks{}"  # states of the user's callbacks; see `callback_states`
CALLBACKS_JSON = "json"  # their structure, as text

# Increase it when an older version could not read what this one writes.
FORMAT = 5

Arrays = Mapping[str, np.ndarray]


class Evaluation(TypedDict):
    """The metrics of the whole test set after a step."""

    step: int
    metrics: dict[str, float | np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstBatch:
    """The digest of the first batch of each replica, and the step that takes it."""

    step: int
    digests: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """The state of a training, apart from its arrays. `Plan` explains its steps.

    Attributes:
        step: global steps taken.
        local_batch_sizes: samples in a batch of each replica.
        global_batch_size: samples of a step of the whole job.
        learning_rate: the rate that `model_fn` chose; None for a schedule of Keras,
            which is a function of the step.
        unchanged: see `RunConfig`; keys of all runs of the job.
        first_batch: None if the input is not checked.
        sample: samples that all ranks have taken.
        original_size: number of replicas with which the job was first started.
        finished: `max_steps` of the job, if the training has ended; else None.
        train_seconds: seconds in `fit`, without evaluations, of all runs.
        skipped_updates: updates that were not finite, of all runs.
        history: the metrics of each epoch by name.
        evaluation_is_due: whether the job was stopped in an evaluation.
        unlisted: number of variables that the training step uses and Keras does not
            list; see `StepVariables`.
    """

    step: int
    local_batch_sizes: tuple[int, ...]
    global_batch_size: int
    learning_rate: float | None = None
    unchanged: dict[str, Any] = dataclasses.field(default_factory=dict)
    first_batch: FirstBatch | None = None
    sample: int
    original_size: int
    fit_epoch_steps: int
    steps_per_execution: int
    finished: int | None = None
    train_seconds: float = 0.0
    skipped_updates: int = 0
    history: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)
    evaluation_is_due: bool = False
    unlisted: int = 0

    @property
    def size(self) -> int:
        """Number of replicas that wrote the checkpoint."""
        return len(self.local_batch_sizes)

    def to_json(self) -> dict[str, Any]:
        """Return values for JSON, except the step."""
        values = dataclasses.asdict(self)
        del values["step"]
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """Where a job continues; `training.position` returns it.

    Attributes:
        step: steps taken before; 0 for a new job.
        sample: samples of all ranks that these steps took.
        original_size: number of replicas that the job was first started with.
    """

    step: int
    sample: int
    original_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A header and arrays by name; `place` is where they were read, for messages."""

    header: Header
    arrays: Arrays
    place: str = ""

    @property
    def step(self) -> int:
        return self.header.step


class OtherModelError(ValueError):
    """The arrays belong to a model with other variables."""


class StoredArray(NamedTuple):
    """An array, and the path of the variable whose value it is."""

    path: str
    value: np.ndarray


class ArrayGroups:
    """Arrays by prefix. Each name is read once, whatever the number of replicas."""

    def __init__(self, arrays: Arrays) -> None:
        self._groups: dict[str, dict[str, np.ndarray]] = {}
        for name, value in arrays.items():
            prefix, _, rest = name.partition("/")
            self._groups.setdefault(prefix, {})[rest] = value

    def by_name(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays under a prefix by the rest of their names."""
        return self._groups.get(prefix, {})

    def by_number(self, prefix: str) -> dict[int, StoredArray]:
        """Return the arrays under a prefix in the order of their numbers."""
        arrays = {}
        for name, value in self.by_name(prefix).items():
            number, _, path = name.partition("/")
            arrays[int(number)] = StoredArray(path, value)
        return {number: arrays[number] for number in sorted(arrays)}

    def values_stored_once(self) -> list[np.ndarray]:
        """Return the values of `StateVariables.stored_once`, in its order."""
        groups = map(self.by_number, STORED_ONCE)
        return [array.value for group in groups for array in group.values()]


def array_name(prefix: str, number: int, path: str) -> str:
    """Return the name of the array of a variable."""
    return f"{prefix}/{number:04}/{path}"


def check_format(values: object) -> None:
    """Raise `ValueError` if the values of a JSON file have an unknown format."""
    file_format = values.get("format") if isinstance(values, dict) else None
    if file_format != FORMAT:
        raise ValueError(
            f"it has the format {file_format}, and this version of hvdtrain reads "
            f"{FORMAT}"
        )


_Parsed = TypeVar("_Parsed")


def parse(cls: type[_Parsed], values: object, **known: object) -> _Parsed:
    """Return a dataclass with fields from JSON and `known`; ignore other keys.

    Raises:
        ValueError: a key is missing, or its value has another type.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{cls.__name__} is {values!r}, expected an object of JSON")
    values = values | known
    types_by_name = typing.get_type_hints(cls)
    arguments = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        name = field.name
        if name in values:
            arguments[name] = _converted(name, values[name], types_by_name[name])
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"it has no {name}")
    return cls(**arguments)


def _converted(name: str, value: Any, expected: Any) -> Any:
    """Convert a value of JSON to the type of its field: lists may become tuples."""
    origin = typing.get_origin(expected) or expected
    arguments = typing.get_args(expected)
    if origin is types.UnionType:
        return None if value is None else _converted(name, value, arguments[0])
    if dataclasses.is_dataclass(origin):
        return parse(typing.cast(type, origin), value)
    # JSON has no tuples, and a float may have been written as an integer.
    accepted = {float: (float, int), tuple: (list, tuple)}.get(origin, origin)
    # In Python a Boolean is an integer.
    is_other = isinstance(value, bool) and origin is not bool
    if is_other or not isinstance(value, accepted):
        raise ValueError(f"{name} is {value!r}, expected {expected}")
    if origin is tuple:
        return tuple(_converted(name, element, arguments[0]) for element in value)
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonFile:
    """The contents of the JSON file of a checkpoint.

    Attributes:
        arrays: name of the file of arrays, in the same directory; `sha256` and `bytes`
            are its digest and its size.
        bfloat16: names of the arrays of bfloat16, which are stored as uint16.
        seconds: time of writing since the epoch.
        metadata: the `Header` without its step.
    """

    arrays: str
    sha256: str
    bytes: int
    bfloat16: list[str]
    format: int = FORMAT
    step: int
    seconds: float
    metadata: dict[str, Any]

    @property
    def header(self) -> Header:
        return parse(Header, self.metadata, step=self.step)


def check_unchanged(before: Header, new: Header) -> None:
    """Check what must be equal in all runs of a job."""
    for name, value in new.unchanged.items():
        if name in before.unchanged and before.unchanged[name] != value:
            raise JobError(
                f"Received {name}={value}; expected {before.unchanged[name]}, with "
                f"which the checkpoint of step {before.step} was written: choose "
                "another model_dir for another job."
            )


def check_batch(before: Header, new: Header, *, scale: float) -> None:
    """Check the global batch, on which the order of the samples depends."""
    batch_before, batch = before.global_batch_size, new.global_batch_size
    if batch != round(batch_before * scale, 3):
        raise JobError(
            f"Received a global batch of {batch} samples ({_ranks(new.size)}); "
            f"expected {batch_before * scale:.9g}: the checkpoint of step "
            f"{before.step} was written with {batch_before} ({_ranks(before.size)}), "
            "and the order of the samples depends on it."
        )


def _ranks(size: int) -> str:
    return f"{size} {'rank' if size == 1 else 'ranks'}"


def check_position(header: Header, scale_from: Position | None) -> None:
    """Check that a job that scales its batch continues from its newest checkpoint."""
    step, sample = header.step, header.sample
    if scale_from and scale_from.step != step:
        raise JobError(
            f"Received scale_from of step {scale_from.step}; expected {step}, the step "
            "of the newest checkpoint of this model: delete the checkpoints after it."
        )
    # Not by the batch: after scaling, a job may have the batch of its first start.
    if not scale_from and sample != step * header.global_batch_size:
        raise JobError(
            f"Received a checkpoint of step {step} after {sample} samples; expected "
            f"{step * header.global_batch_size}: the job scales its batch. Set "
            "scale_from, or --scale_batch."
        )
