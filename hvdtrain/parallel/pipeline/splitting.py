"""The cut of a dense model into stages. Pure functions of its config."""

import dataclasses
import functools
import itertools

import keras


@dataclasses.dataclass(frozen=True)
class Cut:
    """The one tensor that a stage gets from the stage before.

    Attributes:
        history: name of the layer that computes it, number of the layer's call,
            number of the output.
        shape: its shape, with None for the batch.
        dtype: its dtype.
    """

    history: tuple
    shape: tuple
    dtype: str


def split(entries, stages):
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
        starts = [0, *_places(stages, names), len(names)]
    else:
        _check_counts(stages, names)
        # The input layer is the first of the first stage.
        starts = [0, *(1 + end for end in itertools.accumulate(stages))]
    return [entries[start:stop] for start, stop in itertools.pairwise(starts)]


def balanced(sizes, count):
    """Return the number of layers of each stage: the largest has the fewest parameters.

    Each stage begins with a layer that has parameters, but for the first one.

    Args:
        sizes: list of the numbers of parameters of the layers.
        count: number of stages.

    Raises:
        ValueError: there are fewer layers with parameters than stages.
    """
    starts = [place for place, size in enumerate(sizes) if size]
    if len(starts) < count:
        raise ValueError(
            f"Received a model of {len(starts)} layers with weights; expected at least "
            f"{count}, one for each stage."
        )

    @functools.cache
    def best(first, left):
        """Return the largest size, and the starts, of `left` stages from `first` on."""
        if left == 1:
            return sum(sizes[first:]), ()
        found = []
        later = [start for start in starts if any(sizes[first:start])]
        # The stages that follow need a layer each.
        for start in later[: len(later) - left + 2]:
            largest, others = best(start, left - 1)
            largest = max(sum(sizes[first:start]), largest)
            found.append((largest, (start, *others)))
        return min(found)

    bounds = [0, *best(0, count)[1], len(sizes)]
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def _check_counts(stages, names):
    are_counts = all(isinstance(count, int) and count > 0 for count in stages)
    if not are_counts or sum(stages) != len(names) - 1:
        raise ValueError(
            f"Received stages={list(stages)}; expected names of layers, or positive "
            f"numbers that add up to the {len(names) - 1} layers of the model: "
            f"{names[1:]}."
        )


def _places(stages, names):
    unknown = [name for name in stages if name not in names[1:]]
    places = [names.index(name) for name in stages if name not in unknown]
    # Place 0 is the input layer, and place 1 the first layer of the first stage.
    is_ordered = all(a < b for a, b in itertools.pairwise([1, *places]))
    if unknown or not is_ordered:
        raise ValueError(
            f"Received stages={list(stages)}; expected the names of the first layers "
            "of the second stage and those after it, in their order: some of "
            f"{names[2:]}."
        )
    return places


def cuts(stages, outputs):
    """Return the `Cut` before each stage but the first.

    Args:
        stages: the entries of each stage.
        outputs: histories of the model's outputs.

    Raises:
        ValueError: a layer is shared by stages, or more than one tensor or one that
            has no gradient or no fixed shape passes from a stage to the next.
    """
    stage_of = {entry["name"]: s for s, stage in enumerate(stages) for entry in stage}
    used = [list(_inputs(stage)) for stage in stages]
    used[-1] += [(history, None, None) for history in outputs]
    for stage, entries in enumerate(stages):
        for entry in entries:
            _check_not_shared(entry, stage, stage_of)
    return [_cut(s, stage_of, used) for s in range(1, len(stages))]


def _cut(stage, stage_of, used):
    crossing = {}
    for later in used[stage:]:
        for history, shape, dtype in later:
            if stage_of[history[0]] < stage:
                crossing[history] = shape and checked(history, shape, dtype)
    names = [history[0] for history in crossing]
    # Without a shape: an output of the model.
    if len(crossing) != 1 or None in crossing.values():
        raise ValueError(
            f"A pipeline passes one tensor from stage {stage - 1} to stage {stage}. "
            f"Received: a model in which the outputs of {names} are used from there "
            "on. Choose other stages."
        )
    return next(iter(crossing.values()))


def checked(history, shape, dtype):
    """Return a `Cut`.

    Raises:
        ValueError: it has no gradient or no fixed shape.
    """
    if None in shape[1:] or not keras.backend.is_float_dtype(dtype):
        raise ValueError(
            "The output of a stage needs a floating point dtype and a shape that is "
            "known but for the batch. Received: the output of "
            f"{history[0]!r} of shape {tuple(shape)} and dtype {dtype}."
        )
    return Cut(tuple(history), (None, *shape[1:]), dtype)


def _check_not_shared(entry, stage, stage_of):
    for history, _, _ in _inputs([entry]):
        if stage_of[history[0]] > stage:
            raise ValueError(
                f"The layer {entry['name']!r} is called in stage {stage} and, on the "
                f"output of {history[0]!r}, in stage {stage_of[history[0]]}. Layers "
                "that stages share cannot be split: choose other stages."
            )


def config_of(entries, cut, output, name):
    """Return the config of a stage as that of a functional model.

    Args:
        entries: its layers.
        cut: the `Cut` before it; None for the first stage.
        output: history of its output.
        name: name of the model.
    """
    if cut is None:
        source = entries[0]["name"]
    else:
        source = cut.history[0]
        entries = [_input_layer(cut), *(_renamed(e, cut.history) for e in entries)]
    return {
        "name": name,
        "trainable": True,
        "layers": entries,
        "input_layers": [source, 0, 0],
        "output_layers": list(output),
    }


def _input_layer(cut):
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


def _renamed(entry, history):
    """Return an entry in which the tensor of `history` is the output of an input."""

    def rename(value):
        if _is_tensor(value):
            config = value["config"]
            if tuple(config["keras_history"]) == history:
                config = {**config, "keras_history": [history[0], 0, 0]}
            return {**value, "config": config}
        if isinstance(value, dict):
            return {key: rename(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [rename(each) for each in value]
        return value

    return {**entry, "inbound_nodes": rename(entry["inbound_nodes"])}


def _inputs(entries):
    """Yield history, shape and dtype of each tensor that layers are called with."""
    for entry in entries:
        for tensor in _tensors(entry["inbound_nodes"]):
            config = tensor["config"]
            yield tuple(config["keras_history"]), config["shape"], config["dtype"]


def _tensors(value):
    if _is_tensor(value):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _is_tensor(value):
    return isinstance(value, dict) and value.get("class_name") == "__keras_tensor__"
