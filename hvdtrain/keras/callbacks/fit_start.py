"""What all ranks agree on when `fit` starts, and the errors if they cannot."""

import collections
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.objects import (
    allgather_object,
    group_by_value,
    name_ranks,
    name_values,
)
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    global_process_set,
    needs_communication,
)
from hvdtrain.keras.callbacks.effects import (
    callbacks_beside,
    changing_callbacks,
    find_writers,
    warn_of_batch_logs,
    written_twice,
)
from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import is_distributed

# Function of the iterator over batches; returns logs.
TrainFunction = Callable[[Iterator], dict]


class _StandIn:
    def __init__(self, step: TrainFunction, stands_for: TrainFunction | None) -> None:
        self.step, self.stands_for = step, stands_for

    def __call__(self, iterator: Iterator) -> dict:
        return self.step(iterator)


def substitute(model: keras.Model, step: TrainFunction) -> None:
    """Make `fit` call `step` in place of the train function of `model`.

    A `fit` that fails leaves its stand-in in the model. It is removed first: stand-ins
    are never nested.
    """
    stand_in = _StandIn(step, stands_for=restore(model))
    replace(model, "train_function", stand_in, by=substitute)


def restore(model: keras.Model) -> TrainFunction | None:
    """Remove the stand-in, if there is one, and return the train function."""
    if isinstance(model.train_function, _StandIn):
        model.train_function = model.train_function.stands_for
    return model.train_function


# Encodes None among integers.
NONE = -1


class _FitStart(NamedTuple):
    """What a rank knows when its `fit` starts."""

    needs_broadcast: bool
    is_built: bool
    # Whether its callbacks contain `JoinCallback`.
    joins: bool
    # Of an epoch, or NONE.
    steps: int
    # The epoch that Keras' BackupAndRestore has restored, or NONE. The argument
    # `initial_epoch` of `fit` is not known here.
    first_epoch: int
    # Checksum of the names of its callbacks that must be on all ranks.
    callbacks: int
    # Whether they are in a wrong order: see `misplaced`.
    is_misplaced: bool
    # Number of files that its callbacks write: see `find_writers`.
    files: int


# The key of `params`, which Keras gives to all callbacks of one `fit`.
_SHARED = "hvdtrain_callbacks"


class SharedCallback(keras.callbacks.Callback):
    """A callback that all ranks need, since it calls collectives."""

    # Whether its `fit` accepts unequal numbers of batches.
    joins: ClassVar[bool] = False
    # Whether all ranks of its `fit` stop where a callback stops one of them.
    stops_together: ClassVar[bool] = False
    # Callbacks that may not come after it in the list.
    belongs_after: ClassVar[tuple[type[keras.callbacks.Callback], ...]] = ()

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        params.setdefault(_SHARED, []).append(type(self).__name__)
        for name in ("joins", "stops_together"):
            key = f"hvdtrain_{name}"
            params[key] = params.get(key, False) or getattr(self, name)


def shared_callbacks(callback: keras.callbacks.Callback) -> list[str]:
    """Return the names of the `SharedCallback`s of the `fit` of `callback`."""
    return list((callback.params or {}).get(_SHARED, ()))


def joins(callback: keras.callbacks.Callback) -> bool:
    """Return whether `JoinCallback` is in the `fit` of `callback`."""
    return (callback.params or {}).get("hvdtrain_joins", False)


def misplaced(callbacks: Iterable[keras.callbacks.Callback]) -> str:
    """Return the text of an error: a pair in the wrong order; "" if there is none."""
    for earlier, later in itertools.combinations(callbacks, 2):
        if isinstance(earlier, SharedCallback) and isinstance(
            later, earlier.belongs_after
        ):
            names = type(later).__name__, type(earlier).__name__
            return (
                "The ranks would block in different collectives: callbacks are in the "
                f"wrong order. Received: {names[1]} before {names[0]}. Put {names[0]} "
                f"before {names[1]} in the list."
            )
    return ""


class _AgreedEpoch(int):
    """A first epoch that all ranks have agreed on; a restored one is an int."""


def check_distributed(model: keras.Model) -> None:
    """Raise an error if the ranks would train different models in silence.

    A `train_step` of the user is not checked: it may reduce gradients with a
    `DistributedGradientTape`.

    Raises:
        ValueError: for Keras' own `train_step` with a plain optimizer.
    """
    trains_by_keras = type(model).train_step is keras.Model.train_step
    is_missing = model.optimizer is not None and not is_distributed(model.optimizer)
    if trains_by_keras and is_missing and needs_communication(global_process_set):
        raise ValueError(
            "The optimizer is not distributed, so that the ranks would train different "
            f"models. Received: a plain {type(model.optimizer).__name__}, as in a "
            "model that was copied, pickled, loaded by keras.models.load_model, or "
            "compiled again, by a callback for example. Call hvd.DistributedOptimizer("
            "model.optimizer) before fit, pass it to compile, or load the model with "
            "hvd.load_model."
        )


def is_built(model: keras.Model) -> bool:
    """Return whether `model` has all its weights on this rank."""
    return not unbuilt_layers(model) and bool(model.weights)


def unbuilt_layers(model: keras.Model) -> list[str]:
    """Return the names of `model` and its layers where weights are missing."""
    layers = [] if model.built else [model, *model._flatten_layers(include_self=False)]
    return [
        layer.name
        for layer in layers
        if not layer.built
        and type(layer).build not in (keras.layers.Layer.build, keras.Model.build)
    ]


def build(model: keras.Model, call: Callable[[Any], object], batch: Any) -> None:
    """Make the variables of `model` by a trace of `call(batch)`, which is not run.

    Layers are built, and their states stay: counters, recurrent states, seeds. A model
    with `run_eagerly` that cannot be traced is called.
    """
    is_traced = True

    @do_not_convert
    def trace(batch: Any) -> None:
        nonlocal is_traced
        try:
            call(batch)
        except Exception:
            # An error out of the trace would leave variables without initial values.
            is_traced = False
            if not model.run_eagerly:
                raise

    tf.function(trace).get_concrete_function(batch)
    # The losses of the trace are tensors of its graph, which have no value.
    model._clear_losses()
    if not is_traced:
        call(batch)


class Agreement(NamedTuple):
    """What all ranks know about each other before the first step."""

    # Whether one of them needs the weights of the root, or restored its model before.
    needs_broadcast: bool
    # Whether the model is built on all of them.
    is_built: bool


def agree(
    model: keras.Model,
    *,
    callback: keras.callbacks.Callback,
    needs_broadcast: bool,
    root_rank: int,
    process_set: ProcessSet,
) -> Agreement:
    """Make all ranks start `fit` in the epoch of `root_rank`. A collective.

    Args:
        callback: one of the callbacks of this `fit`, which is in `on_train_begin`.
        needs_broadcast: whether this rank needs `root_rank`'s weights.

    Raises:
        ValueError: on every rank, if their numbers of steps differ, if only some of
            them have a callback that must be on all, if callbacks are in a wrong order
            or in different orders on the ranks, or if several ranks write one file.
    """
    params, beside = callback.params or {}, callbacks_beside(callback)
    stops_together = params.get("hvdtrain_stops_together", False)
    changing = changing_callbacks(beside, stops_together=stops_together)
    callbacks = [*shared_callbacks(callback), *sorted(changing)]
    fault, writers = misplaced(beside), find_writers(beside, model)
    steps = params.get("steps")
    epoch = model._initial_epoch
    is_restored = epoch is not None and not isinstance(epoch, _AgreedEpoch)
    start = _FitStart(
        needs_broadcast=needs_broadcast or is_restored,
        is_built=is_built(model),
        joins=joins(callback),
        steps=NONE if steps is None else steps,
        first_epoch=NONE if epoch is None else epoch,
        callbacks=zlib.crc32(" ".join(callbacks).encode()),
        is_misplaced=bool(fault),
        files=len(writers),
    )
    rows = ops.allgather(
        np.array([start], "int64"), "TrainingStart", process_set=process_set
    )
    starts = [_FitStart(*row) for row in rows.numpy().tolist()]
    if len({start.callbacks for start in starts}) > 1:
        names_by_rank = allgather_object(
            callbacks, name="Callbacks", process_set=process_set
        )
        raise ValueError(callbacks_differ(names_by_rank, process_set.ranks))
    if any(start.is_misplaced for start in starts):
        faults = allgather_object(
            fault, name="MisplacedCallbacks", process_set=process_set
        )
        raise ValueError(next(filter(None, faults)))
    if sum(start.files > 0 for start in starts) > 1:
        writers_by_rank = allgather_object(
            writers, name="WrittenFiles", process_set=process_set
        )
        if text := written_twice(writers_by_rank, process_set.ranks):
            raise ValueError(text)
    _check_steps(starts, process_set.ranks)
    first_epoch = starts[list(process_set.ranks).index(root_rank)].first_epoch
    # Keras' fit reads it after on_train_begin.
    model._initial_epoch = None if first_epoch == NONE else _AgreedEpoch(first_epoch)
    warn_of_batch_logs(beside)
    return Agreement(
        needs_broadcast=any(start.needs_broadcast for start in starts),
        is_built=all(start.is_built for start in starts),
    )


def check_first_epoch(epoch: int | None, *, process_set: ProcessSet) -> None:
    """Raise a ValueError on all ranks unless they start in the same epoch.

    A collective. `epoch` is the first one of this rank; None if no epoch is left.
    """
    if not needs_communication(process_set):
        return
    epochs_by_rank = ops.allgather(
        [NONE if epoch is None else epoch], "FirstEpoch", process_set=process_set
    )
    groups = group_by_value(epochs_by_rank.numpy().tolist(), process_set.ranks)
    if len(groups) > 1:
        epochs = name_values(groups, lambda epoch: "none" if epoch == NONE else epoch)
        raise ValueError(
            f"The ranks start in different epochs. Received: {epochs}. Pass the same "
            "initial_epoch and epochs to fit on every rank, and put "
            "keras.callbacks.BackupAndRestore before "
            "hvd.callbacks.BroadcastGlobalVariablesCallback in the list."
        )


def callbacks_differ(
    names_by_rank: Sequence[Sequence[str]], ranks: Sequence[int]
) -> str:
    """Return the text of an error: which callbacks are on which ranks; "" if equal.

    Args:
        names_by_rank: the names on each rank, in the order of its list.
    """
    counts_by_rank = [collections.Counter(names) for names in names_by_rank]
    texts = []
    for name in sorted(set().union(*counts_by_rank)):
        groups = group_by_value([counts[name] for counts in counts_by_rank], ranks)
        if len(groups) > 1:
            on = [rank for group in groups if group.value for rank in group.ranks]
            others = [group.ranks for group in groups if not group.value]
            texts.append(
                f"{name} on {name_ranks(sorted(on))} and not on {name_ranks(others[0])}"
                if others
                else f"{name} {name_values(groups, '{} times'.format)}"
            )
    if not texts:
        orders = group_by_value(names_by_rank, ranks)
        if len(orders) == 1:
            return ""
        return (
            "The ranks have callbacks in different orders: they would block in "
            f"different collectives. Received: {name_values(orders, ', '.join)}. Pass "
            "them in one order on every rank."
        )
    return (
        "The ranks have different callbacks: those that call collectives would block, "
        "and those that change weights, rates or the end of training would do so on "
        f"some ranks alone. Received: {'; '.join(texts)}. Pass them to fit on every "
        "rank; callbacks that only print or write files may be on rank 0 alone, and "
        "those that stop training on some ranks beside hvd.callbacks."
        "StopTogetherCallback()."
    )


def _check_steps(starts: Sequence[_FitStart], ranks: Sequence[int]) -> None:
    if any(start.joins for start in starts):
        return
    groups = group_by_value([start.steps for start in starts], ranks)
    groups = [group for group in groups if group.value != NONE]
    if len(groups) > 1:
        raise ValueError(
            "The ranks have different numbers of steps in an epoch: those with more "
            f"would block in a collective. Received: {name_values(groups)}. Pass "
            f"steps_per_epoch={min(group.value for group in groups)} to fit, deal "
            "equally many batches to every rank (drop_remainder=True), or add "
            "hvd.callbacks.JoinCallback()."
        )
