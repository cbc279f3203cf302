"""What the phases of a verification write, and the files in which they write it."""

import dataclasses
import hashlib
import os
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

Phase: TypeAlias = Literal["ranks", "reference", "alone"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseOptions:
    """What a phase of a verification does.

    Attributes:
        phase: one of the phases in the docstring of the package.
        directory: the directory with the files of all phases.
        size: the number of ranks of the phase "ranks".
        steps: the script ends after this number of steps.
        dtype: the dtype of all computations; None for the script's own dtypes.
        divisor: of the gradients in the reference: what the script multiplies them by
            because of the number of ranks.
    """

    phase: Phase
    directory: str
    size: int
    steps: int
    dtype: str | None
    divisor: float = 1.0


@dataclasses.dataclass(kw_only=True)
class Reductions:
    """How a script reduces gradients, noted while its first step is traced.

    Attributes:
        kinds: the operation and the compression of each reduction, such as ("Average",
            "NoneCompressor").
        has_dense_rows: whether `sparse_as_dense` made sparse gradients dense.
        is_by_script: whether the script itself reduces tensors, by `hvd.allreduce`.
        has_sums: whether it does so with `op=hvd.Sum`.
        weights: digests of the weights before the first reduction, by name.
        names: of the variables whose gradients are reduced.
        is_clipped: whether the script clips gradients before it reduces them.
        constants: values in the graph of the first reduction, or their digests, by the
            name of the operation.
    """

    kinds: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    has_dense_rows: bool = False
    is_by_script: bool = False
    has_sums: bool = False
    weights: dict[str, str] = dataclasses.field(default_factory=dict)
    names: set[str] = dataclasses.field(default_factory=set)
    is_clipped: bool = False
    constants: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The state of a training on one rank after a step.

    Attributes:
        variables: values of the weights and of the optimizers' variables by name, on
            rank 0; their digests on the other ranks. Empty in the phase "alone".
        learning_rates: by the name of the optimizer.
        metric_states: values of the variables of metrics that are known to be sums.
        metrics: results of these metrics by name.
        metrics_of_ranks: in the reference, the results over all ranks of the first
            phase; None elsewhere.
    """

    variables: Mapping[str, Any]
    learning_rates: Mapping[str, float]
    metric_states: list[np.ndarray]
    metrics: Mapping[str, Any]
    metrics_of_ranks: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a script has built, when each of its optimizers has done a step.

    Attributes:
        reductions: of gradients.
        loss_reductions: of all losses of Keras, as `find_kind` names them.
        local_normalizations: names of layers with moments of the local batch.
        masking_layers: names of layers that make masks.
        regularized_layers: names of layers that add to `model.losses`.
        learned: what preprocessing layers have learned from samples, by its name; for a
            long value its checksum.
        class_weights: the arguments `class_weight` of the script.
        seeds: of layers that draw random numbers, by the name of the layer.
        batch_losses: names of losses of a batch that are no means over its samples.
        unreduced: names of optimizers whose gradients are not reduced, where those of
            others are.
        trained: names of the weights of optimizers that have taken a step.
        untrained: digests of other weights, by name, but for moving statistics.
        made_untrained: names of weights that layers made with `trainable=False`.
        gradients: norms of the first gradients, by name of the variable.
        other_draws: names of layers that have drawn random numbers; in the reference,
            of those whose numbers are not the ones of the ranks.
        left_out: what of the script is not compared.
    """

    reductions: Reductions
    loss_reductions: list[str]
    local_normalizations: list[str]
    masking_layers: list[str]
    regularized_layers: list[str]
    learned: Mapping[str, str]
    class_weights: str
    seeds: Mapping[str, int]
    batch_losses: list[str]
    unreduced: list[str]
    trained: list[str]
    untrained: Mapping[str, str]
    made_untrained: list[str]
    gradients: Mapping[str, float]
    other_draws: list[str]
    left_out: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptEnd:
    """How the script has ended on a rank, before its last recorded step.

    Attributes:
        time: in seconds, of the clock of this machine.
        has_failed: whether it ended by an error.
        is_exit: whether the script has printed the error itself, as one line.
        is_in_step: whether it has read a batch after its last step.
    """

    time: float
    has_failed: bool = False
    is_exit: bool = False
    is_in_step: bool = False


class Directory:
    """The files of one phase.

    A file's name is its kind, the rank, and numbers: `batch-0-1-5` is batch 5 of
    stream 1 on rank 0.
    """

    def __init__(self, path: pathlib.Path, phase: str) -> None:
        self._path = path / phase
        self._path.mkdir(exist_ok=True)

    def write(self, kind: str, *numbers: int, value: object) -> None:
        """Write a file as a whole, or not at all."""
        path = self._file(kind, *numbers)
        # A process that ends while it writes leaves a file of this name.
        unfinished = path.with_name(f"{path.name}.unfinished")
        with unfinished.open("wb") as file:
            pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
        os.replace(unfinished, path)

    def read(self, kind: str, *numbers: int) -> Any:
        """Return what was written, or None if there is no such file."""
        try:
            with self._file(kind, *numbers).open("rb") as file:
                return pickle.load(file)
        except FileNotFoundError:
            return None

    def last_numbers(self, kind: str, *numbers: int) -> list[int]:
        """Return the last number of each file with this kind and first numbers."""
        start = "-".join([kind, *map(str, numbers), ""])
        ends = [path.name.removeprefix(start) for path in self._path.glob(f"{start}*")]
        return sorted(int(end) for end in ends if end.isdigit())

    def _file(self, kind: str, *numbers: int) -> pathlib.Path:
        return self._path / "-".join([kind, *map(str, numbers)])


def digest(value: np.ndarray) -> str:
    """Return a digest of the bytes of an array."""
    return hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()
