"""What all ranks agree on when `fit` starts, and the errors if they cannot."""

from typing import NamedTuple

import keras
import numpy as np

from hvdtrain.collectives import ops
from hvdtrain.collectives.objects import group_by_value, name_values
from hvdtrain.collectives.process_sets import global_process_set, needs_communication
from hvdtrain.keras.optimizer import is_distributed
from hvdtrain.keras.seams import replace


def substitute(model, step):
    """Makes `fit` call `step(iterator)` in place of the train function of `model`.

    The stand-in has one attribute, `stands_for`: the train function that it replaces.
    A `fit` that fails leaves its stand-in in the model. It is removed first: stand-ins
    are never nested.
    """
    restore(model)

    def stand_in(iterator):
        return step(iterator)

    stand_in.stands_for = replace(model, "train_function", stand_in, by=substitute)


def restore(model):
    """Removes the stand-in, if there is one, and returns the train function."""
    function = model.train_function
    model.train_function = getattr(function, "stands_for", function)
    return model.train_function


# Stands for None among integers.
NONE = -1


class _Start(NamedTuple):
    # What a rank contributes. The first epoch is that of Keras' BackupAndRestore,
    # and not fit's argument initial_epoch.
    needs_broadcast: bool
    is_built: bool
    joins: bool
    steps: int
    first_epoch: int


class _AgreedEpoch(int):
    """A first epoch that all ranks have agreed on; a restored one is an int."""


def check_distributed(model):
    """Raises an error if the ranks would train different models in silence.

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
            "model that was copied, pickled or loaded by keras.models.load_model. Call "
            "hvd.DistributedOptimizer(model.optimizer) before fit, or load the model "
            "with hvd.load_model."
        )


def is_built(model):
    """Whether `model` has all its weights on this rank."""
    return not unbuilt_parts(model) and bool(model.weights)


def unbuilt_parts(model):
    """Names of the layers of `model`, and of itself, without weights so far."""
    layers = [] if model.built else [model, *model._flatten_layers(include_self=False)]
    return [
        layer.name
        for layer in layers
        if not layer.built
        and type(layer).build not in (keras.layers.Layer.build, keras.Model.build)
    ]


def agree(model, *, steps, needs_broadcast, root_rank, process_set):
    """Makes all ranks start `fit` in the epoch of `root_rank`; a collective.

    Args:
        model: the model that `fit` is about to train.
        steps: number of steps in an epoch of this rank, or None if unknown.
        needs_broadcast: whether this rank needs `root_rank`'s weights.
        root_rank: a rank of `process_set`.
        process_set: the ranks that train.

    Returns:
        Two bools, the same on every rank. Whether all ranks have to take part in a
        broadcast: one of them needs it, or a callback before has restored its model.
        And whether the model is built on all of them.

    Raises:
        ValueError: on every rank, if their numbers of steps differ, or if only some
            of them have a `JoinCallback`.
    """
    epoch = model._initial_epoch
    is_restored = epoch is not None and not isinstance(epoch, _AgreedEpoch)
    mine = _Start(
        needs_broadcast=needs_broadcast or is_restored,
        is_built=is_built(model),
        joins=getattr(model, "_hvdtrain_joins", False),
        steps=NONE if steps is None else steps,
        first_epoch=NONE if epoch is None else epoch,
    )
    rows = ops.allgather(
        np.array([mine], "int64"), "TrainingStart", process_set=process_set
    )
    starts = [_Start(*row) for row in rows.numpy().tolist()]
    # A fit that fails skips on_train_end. JoinCallback sets the mark in each fit.
    model._hvdtrain_joins = False
    _check_joins(starts, process_set.ranks)
    _check_steps(starts, process_set.ranks)
    first_epoch = starts[list(process_set.ranks).index(root_rank)].first_epoch
    # Keras' fit reads it after on_train_begin.
    model._initial_epoch = None if first_epoch == NONE else _AgreedEpoch(first_epoch)
    return (
        any(start.needs_broadcast for start in starts),
        all(start.is_built for start in starts),
    )


def check_first_epoch(epoch, *, process_set):
    """Raises an error unless all ranks start in the same epoch; a collective.

    Args:
        epoch: the first epoch of this rank; None if there is no epoch left.
        process_set: the ranks that train.

    Raises:
        ValueError: on every rank.
    """
    if not needs_communication(process_set):
        return
    mine = [NONE if epoch is None else epoch]
    epochs = ops.allgather(mine, "FirstEpoch", process_set=process_set)
    groups = group_by_value(epochs.numpy().tolist(), process_set.ranks)
    if len(groups) > 1:
        found = name_values(groups, lambda epoch: "none" if epoch == NONE else epoch)
        raise ValueError(
            f"The ranks start in different epochs. Received: {found}. Pass the same "
            "initial_epoch and epochs to fit on every rank, and put "
            "keras.callbacks.BackupAndRestore before "
            "hvd.callbacks.BroadcastGlobalVariablesCallback in the list."
        )


def _check_joins(starts, ranks):
    # A rank that joins blocks until all ranks have joined.
    joining = [rank for rank, start in zip(ranks, starts, strict=True) if start.joins]
    others = [rank for rank in ranks if rank not in joining]
    if joining and others:
        raise ValueError(
            "Only some ranks have hvd.callbacks.JoinCallback: they would block in a "
            f"join. Received: it is on ranks {joining} and not on ranks {others}. Put "
            "JoinCallback on every rank."
        )


def _check_steps(starts, ranks):
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
