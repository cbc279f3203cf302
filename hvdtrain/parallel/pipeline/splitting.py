"""Split a full model into stages. Pure functions of its config."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras

# The config of a layer, as an entry of the config of a functional model.
Entry: TypeAlias = dict[str, Any]
# Name of the layer that computes a tensor, number of the call, number of the output.
History: TypeAlias = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The one tensor that a stage gets from the stage before.

    `shape` has None for the batch.
    """

    history: History
    shape: tuple[int | None, ...]
    dtype: str


def split(
    entries: Sequence[Entry], stages: str | Sequence[str] | Sequence[int]
) -> list[Sequence[Entry]]:
    """Return the layers of each stage, as lists of entries of a config.

    Args:
        entries: the layers of a functional model's config, in its order.
        stages: names of the first layer of each stage but the first; or numbers of
            layers per stage, which do not count the input layer.

    Raises:
        ValueError: there are no such layers, or the numbers do not add up.
    """
    names = [entry["name"] for entry in entries]
    if isinstance(stages, str):
        stages = [stages]
    if all(isinstance(stage, str) for stage in stages):
        starts = [0, *_find_starts(stages, names), len(names)]
    else:
        _check_counts(stages, names)
        # The input layer is the first of the first stage.
        starts = [0, *(1 + end for end in itertools.accumulate(map(int, stages)))]
    return [entries[start:stop] for start, stop in itertools.pairwise(starts)]


def balance(sizes: Sequence[int], count: int) -> list[int]:
    """Return numbers of layers by stage, so that the largest stage is smallest.

    Each stage but the first begins with a layer that has parameters; `sizes` has the
    numbers of parameters of the layers.

    Raises:
        ValueError: there are fewer layers with parameters than stages.
    """
    starts = [number for number, size in enumerate(sizes) if size]
    if len(starts) < count:
        raise ValueError(
            f"Received a model of {len(starts)} layers with weights; expected at least "
            f"{count}, one for each stage."
        )

    @functools.cache
    def best(first: int, left: int) -> tuple[int, tuple[int, ...]]:
        """Return the largest size, and the starts, of `left` stages from `first` on."""
        if left == 1:
            return sum(sizes[first:]), ()
        candidates = []
        later = [start for start in starts if any(sizes[first:start])]
        # The stages that follow need a layer each.
        for start in later[: len(later) - left + 2]:
            largest, others = best(start, left - 1)
            largest = max(sum(sizes[first:start]), largest)
            candidates.append((largest, (start, *others)))
        return min(candidates)

    bounds = [0, *best(0, count)[1], len(sizes)]
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def _check_counts(stages: Sequence[Any], names: Sequence[str]) -> None:
    are_counts = all(isinstance(count, int) and count > 0 for count in stages)
    if not are_counts or sum(stages) != len(names) - 1:
        raise ValueError(
            f"Received stages={list(stages)}; expected names of layers, or positive "
            f"numbers that add up to the {len(names) - 1} layers of the model: "
            f"{names[1:]}."
        )


def _find_starts(stages: Sequence[Any], names: Sequence[str]) -> list[int]:
    unknown = [name for name in stages if name not in names[1:]]
    starts = [names.index(name) for name in stages if name not in unknown]
    # 0 is the input layer, and 1 the first layer of the first stage.
    is_ordered = all(a < b for a, b in itertools.pairwise([1, *starts]))
    if unknown or not is_ordered:
        raise ValueError(
            f"Received stages={list(stages)}; expected the names of the first layers "
            "of the second stage and the later ones, in their order: some of "
            f"{names[2:]}."
        )
    return starts


def find_cuts(
    stages: Sequence[Sequence[Entry]], outputs: Iterable[History]
) -> list[Cut]:
    """Return the `Cut` before each stage but the first.

    Raises:
        ValueError: stages share a layer, or a stage passes more than one tensor, or one
            without a gradient or a fixed shape, to the next stage.
    """
    stage_of = {entry["name"]: s for s, stage in enumerate(stages) for entry in stage}
    used = [list(_list_inputs(stage)) for stage in stages]
    used[-1] += [(history, None, None) for history in outputs]
    for stage, entries in enumerate(stages):
        for entry in entries:
            _check_not_shared(entry, stage, stage_of)
    return [_find_cut(s, stage_of, used) for s in range(1, len(stages))]


def _find_cut(
    stage: int, stage_of: dict[str, int], used: Sequence[Sequence[tuple]]
) -> Cut:
    crossing: dict[History, Cut | None] = {}
    for later in used[stage:]:
        for history, shape, dtype in later:
            if stage_of[history[0]] < stage:
                crossing[history] = shape and make_cut(history, shape, dtype)
    names = [history[0] for history in crossing]
    cut = next(iter(crossing.values()), None)
    # None is an output of the model that an earlier stage computes.
    if len(crossing) != 1 or cut is None:
        raise ValueError(
            f"A pipeline passes one tensor from stage {stage - 1} to stage {stage}. "
            f"Received: a model in which the outputs of {names} are used from there "
            "on. Choose other stages."
        )
    return cut


def make_cut(history: History, shape: tuple[int | None, ...], dtype: str) -> Cut:
    """Return a `Cut`, or raise a ValueError for a tensor that no stage can send."""
    if None in shape[1:] or not keras.backend.is_float_dtype(dtype):
        raise ValueError(
            "The output of a stage needs a floating point dtype and a shape that is "
            "known but for the batch. Received: the output of "
            f"{history[0]!r} of shape {tuple(shape)} and dtype {dtype}."
        )
    return Cut(history, (None, *shape[1:]), dtype)


def _check_not_shared(entry: Entry, stage: int, stage_of: dict[str, int]) -> None:
    for history, _, _ in _list_inputs([entry]):
        if stage_of[history[0]] > stage:
            raise ValueError(
                f"The layer {entry['name']!r} is called in stage {stage} and, on the "
                f"output of {history[0]!r}, in stage {stage_of[history[0]]}. Layers "
                "that stages share cannot be split: choose other stages."
            )


def make_config(
    entries: Sequence[Entry], cut: Cut | None, output: History, name: str
) -> dict[str, Any]:
    """Return the config of a functional model of the layers of a stage.

    `cut` is the `Cut` before the stage; None for the first one.
    """
    if cut is None:
        source = entries[0]["name"]
    else:
        source = cut.history[0]
        entries = [_input_layer(cut), *(_take_input(e, cut.history) for e in entries)]
    return {
        "name": name,
        "trainable": True,
        "layers": entries,
        "input_layers": [source, 0, 0],
        "output_layers": list(output),
    }


def _input_layer(cut: Cut) -> Entry:
    name = cut.history[0]
    config = {"batch_shape": list(cut.shape), "dtype": cut.dtype, "name": name}
    return {
        "module": "keras.layers",
        "class_name": "InputLayer",
        "config": config,
        "registered_name": None,
        "name": name,
        "inbound_nodes": [],
    }


def _take_input(entry: Entry, history: History) -> Entry:
    """Return an entry that takes the tensor of `history` from an input layer."""

    def rename(value: Any) -> Any:
        if _is_tensor(value):
            config = value["config"]
            if tuple(config["keras_history"]) == history:
                config = {**config, "keras_history": [history[0], 0, 0]}
            return {**value, "config": config}
        if isinstance(value, dict):
            return {key: rename(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [rename(item) for item in value]
        return value

    return {**entry, "inbound_nodes": rename(entry["inbound_nodes"])}


def _list_inputs(entries: Iterable[Entry]) -> Iterator[tuple]:
    """Yield history, shape and dtype of each tensor that layers are called with."""
    for entry in entries:
        for tensor in _tensors(entry["inbound_nodes"]):
            config = tensor["config"]
            yield tuple(config["keras_history"]), config["shape"], config["dtype"]


def _tensors(value: Any) -> Iterator[dict[str, Any]]:
    if _is_tensor(value):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and value.get("class_name") == "__keras_tensor__"
