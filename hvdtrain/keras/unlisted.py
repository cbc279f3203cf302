"""What is in no variable, and must be equal on all ranks.

The vocabulary of a lookup layer is in a table, the bins of `Discretization` are in a
list, and both come from the samples that `adapt` reads. The momentum of an optimizer is
a number of Python. No broadcast of variables has these: the ranks compare them.
"""

import inspect
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.keras.variables import Optimizer, optimizers_inside, variable_key


class Unlisted(NamedTuple):
    """A value that is in no variable.

    Attributes:
        name: with its owner, as messages have it.
        text: the value; or, in place of a long one, its length and checksum.
        remedy: what makes it equal on all ranks.
    """

    name: str
    text: str
    remedy: str


class _Learned(NamedTuple):
    """What layers of some classes learn from the samples that `adapt` reads."""

    classes: tuple[type[keras.layers.Layer], ...]
    name: str
    read: Callable[[Any], Any]
    share: str


# Of a `Normalization` that is not adapted.
INITIAL = "the initial value"
_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup)
_NORMALIZATION = (
    "hvd.broadcast_variables(model.variables, root_rank=0). If it is meant to differ, "
    "call optimizer.register_local_var for each variable of the layer."
)
_LEARNED = (
    _Learned(
        (*_LOOKUPS, keras.layers.TextVectorization),
        "vocabulary",
        lambda layer: layer.get_vocabulary(),
        "layer.set_vocabulary(hvd.broadcast_object(layer.get_vocabulary()))",
    ),
    _Learned(
        _LOOKUPS,
        "idf_weights",
        lambda layer: getattr(layer, "idf_weights_const", None),
        "layer.set_vocabulary(*hvd.broadcast_object((vocabulary, idf_weights)))",
    ),
    _Learned(
        (keras.layers.Discretization,),
        "bin_boundaries",
        lambda layer: layer.bin_boundaries,
        "layer.bin_boundaries = hvd.broadcast_object(list(layer.bin_boundaries))",
    ),
    _Learned(
        (keras.layers.Normalization,),
        "mean",
        lambda layer: _moment(layer.mean, 0),
        _NORMALIZATION,
    ),
    _Learned(
        (keras.layers.Normalization,),
        "variance",
        lambda layer: _moment(getattr(layer, "variance", None), 1),
        _NORMALIZATION,
    ),
)


def learned_state(
    model: keras.Model,
    *,
    local_keys: Set[object] = frozenset(),
    is_derived: bool = True,
) -> Iterator[Unlisted]:
    """Yield what preprocessing layers of `model` have learned from samples.

    Args:
        local_keys: `variable_key`s of variables that may differ by rank; so may what
            a layer derives from them.
        is_derived: whether to include what layers derive from their variables.
    """
    layers = list(model._flatten_layers())
    texts = [x for x in layers if isinstance(x, keras.layers.TextVectorization)]
    # Such a layer returns the vocabulary of a lookup layer that it contains.
    inside = {x for each in texts for x in each._flatten_layers(include_self=False)}
    for layer in layers:
        for learned in _LEARNED:
            keys = set(map(variable_key, layer.weights))
            is_excluded = keys and (keys <= local_keys or not is_derived)
            is_read = learned.name == "vocabulary" and layer in inside
            if isinstance(layer, learned.classes) and not (is_excluded or is_read):
                yield Unlisted(
                    f"the {learned.name} of the layer {layer.name}",
                    _summarize(learned.read(layer)),
                    "Give all ranks what one process learns from all samples, by "
                    "hvdtrain.training.adapt(layer, source, world=world), or the state "
                    f"of rank 0, before the first step, by {learned.share}",
                )


def _moment(value: Any, initial: int) -> Any:
    is_value = hasattr(value, "numpy")
    return INITIAL if is_value and np.all(np.equal(value, initial)) else value


def _summarize(value: Any) -> str:
    # Without `adapt` there is no value; that of a graph cannot be read.
    if value is None or (isinstance(value, tf.Tensor) and not hasattr(value, "numpy")):
        return "no value"
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        size, data = len(value), "\0".join(map(str, value)).encode()
    else:
        array = np.asarray(value)
        size, data = array.size, array.tobytes()
    return f"{size} values with the checksum {zlib.crc32(data):08x}"


def find_unlisted(
    model: keras.Model | None,
    optimizers: Iterable[Optimizer],
    local_keys: Set[object],
) -> list[Unlisted]:
    """Return what layers of `model` have learned, and hyperparameters of optimizers."""
    learned = learned_state(model, local_keys=local_keys) if model else ()
    return [*learned, *itertools.chain(*map(_hyperparameters, optimizers))]


def _hyperparameters(optimizer: Optimizer) -> Iterator[Unlisted]:
    """Yield the numbers that Keras' optimizer and its schedule were made with."""
    optimizers = dict.fromkeys([optimizer, *optimizers_inside(optimizer)])
    rates = [vars(each).get("_learning_rate") for each in optimizers]
    schedule_class = keras.optimizers.schedules.LearningRateSchedule
    schedules = [rate for rate in rates if isinstance(rate, schedule_class)]
    for owner in [*optimizers, *schedules]:
        for name, value in _arguments(owner).items():
            yield Unlisted(
                f"{name} of {type(owner).__name__}",
                f"{value:.6g}" if isinstance(value, float) else str(value),
                "Pass the same value on every rank.",
            )


def _arguments(owner: object) -> dict[str, object]:
    """Return the numbers and flags that a constructor of Keras took.

    Arguments of a user's own class may differ by rank: whether it prints, say.
    """
    classes = [c for c in type(owner).__mro__ if c.__module__.split(".")[0] == "keras"]
    constructors = [vars(cls).get("__init__") for cls in classes]
    signatures = map(inspect.signature, filter(None, constructors))
    names = {name for signature in signatures for name in signature.parameters}
    attributes = vars(owner)
    return {
        name: attributes[name]
        for name in sorted(names & attributes.keys())
        if isinstance(attributes[name], bool | int | float | None)
    }
