"""Stops a job whose ranks no longer hold the same model."""

import zlib

import keras
import numpy as np

from hvdtrain.collectives import ops
from hvdtrain.collectives.objects import allgather_object
from hvdtrain.collectives.process_sets import global_process_set, needs_communication
from hvdtrain.keras.callbacks.every import EverySteps
from hvdtrain.keras.gradients import variable_key
from hvdtrain.keras.optimizer import process_set_of
from hvdtrain.keras.variables import replicated_variables


class DesynchronizedError(RuntimeError):
    """Variables that must be equal on all ranks are not."""


class ConsistencyCheckCallback(keras.callbacks.Callback):
    """Checks that all ranks hold the same weights and optimizer state.

    The ranks of the optimizer's `process_set` compare a checksum (CRC-32) of the
    variables' bytes: before the first step, after every `every_steps`, and at the
    end. Gradients that were not reduced, weights that were not broadcast, a rate
    set on one rank only: all of them raise `DesynchronizedError`, with the same text
    on every rank. Variables that the optimizer knows as local are left out.

    The first check covers all weights (but if `fit` still has to build the model, it
    is left out). Later ones leave out weights that are not trainable, since the
    moving averages of `BatchNormalization` are each rank's own. Another `fit` has a
    first check only if this callback is new on some rank, such as one that has come
    late to an elastic job: the ranks ask each other when training begins.

    Args:
        every_steps: training steps from one check to the next.
        local_variables: list of further variables that each rank keeps for itself.
    """

    def __init__(self, every_steps=1000, *, local_variables=()):
        super().__init__()
        self._has_come = EverySteps(every_steps)
        self._is_due = False
        self._local_keys = {variable_key(variable) for variable in local_variables}
        self._has_started = False

    def on_train_begin(self, logs=None):
        """Starts counting anew, and lets all ranks have a first check or none."""
        self._has_come.reset()
        self._is_due = False
        self._has_started = ops.is_true_on_all_ranks(
            self._has_started,
            name="ConsistencyHasStarted",
            process_set=process_set_of(self.model.optimizer),
        )

    def on_train_batch_begin(self, batch, logs=None):
        """Checks the state that the steps before have left."""
        if self._has_started:
            if self._is_due:
                self._check_trained()
        elif self.model.built:
            # Here, and not in on_train_begin: by now all other callbacks have
            # restored and broadcast, in whatever order they stand.
            self._check(replicated_variables(self.model, local_keys=self._local_keys))
        self._has_started = True
        self._is_due = False

    def on_train_batch_end(self, batch, logs=None):
        """Counts; the check waits until all callbacks have seen the batch."""
        self._is_due |= self._has_come(batch)

    def on_train_end(self, logs=None):
        """Checks the state that training has reached."""
        self._check_trained()

    def _check_trained(self):
        untrained = {variable_key(v) for v in self.model.non_trainable_weights}
        self._check(
            replicated_variables(self.model, local_keys=self._local_keys | untrained)
        )

    def _check(self, variables):
        check_consistency(variables, process_set=process_set_of(self.model.optimizer))


def check_consistency(variables, *, process_set=global_process_set):
    """Raises an error on every rank unless `variables` are equal on all of them.

    Args:
        variables: list of Keras variables, the same on every rank.
        process_set: the ranks that take part.

    Raises:
        DesynchronizedError: names the first variable that differs, and the ranks
            that agree on it among each other.
    """
    if not needs_communication(process_set):
        return
    checksums = [_checksum(variable) for variable in variables]
    digest = zlib.crc32(np.array(checksums, "uint32").tobytes())
    mine = np.array([digest], "int64")
    digests = ops.allgather(mine, "Consistency", process_set=process_set)
    # One number a rank says whether all is well. Only if not, details travel.
    if len(set(digests.numpy().tolist())) > 1:
        paths = [variable.path for variable in variables]
        described = list(zip(paths, checksums, strict=True))
        everyone = allgather_object(
            described, name="ConsistencyDetails", process_set=process_set
        )
        raise DesynchronizedError(_explain(everyone, process_set.ranks))


def _checksum(variable):
    value = np.ascontiguousarray(variable.numpy())
    header = f"{value.dtype} {value.shape}".encode()
    return zlib.crc32(value.view("uint8").reshape(-1), zlib.crc32(header))


def _explain(everyone, ranks):
    counts = dict(zip(ranks, map(len, everyone), strict=True))
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
        return (
            f"The ranks train different models: number of variables is {found}. "
            "Build and compile the same model on every rank."
        )
    differing = []
    for entries in zip(*everyone, strict=True):
        ranks_by_checksum = {}
        for rank, (_, checksum) in zip(ranks, entries, strict=True):
            ranks_by_checksum.setdefault(checksum, []).append(str(rank))
        if len(ranks_by_checksum) > 1:
            differing.append((entries[0][0], ranks_by_checksum.values()))
    path, groups = differing[0]
    return (
        f"The ranks have drifted apart: {len(differing)} of {len(everyone[0])} "
        f"variables differ. First: {path}, where "
        + " and ".join(_name_group(ranks) for ranks in groups)
        + " hold different values. Check that the optimizer is a DistributedOptimizer "
        "and that BroadcastGlobalVariablesCallback(0) is the first callback, and name "
        "variables that are meant to differ in local_variables."
    )


def _name_group(ranks):
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
