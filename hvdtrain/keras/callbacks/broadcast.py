"""Broadcast of weights and optimizer state before the first training step."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.objects import (
    allgather_object,
    group_by_value,
    name_values,
)
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    check_root,
    needs_communication,
)
from hvdtrain.keras import layer_state
from hvdtrain.keras.callbacks import fit_start
from hvdtrain.keras.callbacks.consistency_check import check_model, check_trained
from hvdtrain.keras.consistency import BROADCAST_AGAIN
from hvdtrain.keras.layers import check_synchronized, local_normalizations
from hvdtrain.keras.optimizer import configure_compiled_model
from hvdtrain.keras.replication import (
    get_hook,
    get_local_keys,
    get_process_set,
    get_training_ranks,
    non_local_variables,
    replicated_by_process_set,
)
from hvdtrain.keras.seeds import global_seed_state, seed_states, separate_seeds
from hvdtrain.keras.variables import Variable, variable_key
from hvdtrain.sharding.shards import is_sharded

_AVERAGING = "AverageMovingStatisticsCallback"
# Of one broadcast, at most, unless one variable is larger. The received values are in
# memory beside the variables.
_BROADCAST_BYTES = 256 << 20


class BroadcastGlobalVariablesCallback(fit_start.SharedCallback):
    """Gives all ranks `root_rank`'s weights and optimizer state when training starts.

    The ranks are those of the optimizer's `process_set`. Variables that are
    registered with the optimizer as local stay as they are.

    Put it first in the list of callbacks. It acts once for a model, in the first
    `fit`, before the first step. (Horovod's callback acts after the first step, in
    which every rank has updated a different model.) A model that has not been built
    on every rank is traced with the first batch, unless all its layers are built.
    Optimizers that a `train_step` uses besides the compiled one are not broadcast.

    In a later `fit` it acts again if it is new on some rank, such as one that joined
    an elastic job later and would block in the broadcast alone, or if a callback has
    restored the model. To detect this costs one small allgather; to broadcast in every
    `fit` would cost all of the weights. If it does not act, the ranks compare checksums
    of trained weights, optimizer state and hyperparameters (some 0.5 s for 25 million
    weights and their momentum), since one rank may have changed them between two fits.

    `keras.callbacks.BackupAndRestore` works on rank 0 alone, before this callback: all
    ranks then take the weights that it restores, and continue in its epoch.

        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        if hvd.rank() == 0:
            callbacks.insert(0, keras.callbacks.BackupAndRestore("backup"))

    It warns of `BatchNormalization` whose moving statistics nothing combines.

    Metrics stay as they are. So do the states of random layers such as Dropout,
    except that equal seeds on several ranks are made different: see `separate_seeds`.
    It also calls `optimizer.configure_compiled_model(model)`.

    Args:
        root_rank: one of the process set.
        device: where the broadcast runs; "" is the default device.
        local_variables: variables that may differ by rank. Their slots in the
            optimizer (momentum, say) stay as well.

    Raises:
        ValueError: in `fit`, on every rank, if the ranks' models or optimizers have
            different variables, if they would take different numbers of steps without
            `JoinCallback` or start in different epochs, if only some of them have a
            callback that calls collectives or changes weights, rates or the end of
            training, if their order is wrong or differs, or if several ranks have a
            callback of Keras that writes one file; if `root_rank` does not train with
            them, if the optimizer of Keras' own `train_step` is not distributed (also
            before each batch: a callback may compile the model again), if rank 0 alone
            has loaded a state that is sharded (`shard_state`), or for a model without
            `call` that has not been built.
        TypeError: for the result of Horovod's own `DistributedOptimizer`.
        DesynchronizedError: in `fit`, on every rank, if the ranks differ in what is in
            no variable, such as vocabularies of layers or the momentum of SGD; have
            adapted a `Normalization` to different samples; or have changed their models
            in different ways since the last `fit`.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Variable | Iterable[Variable] | None = None,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        # Shards a model that is built, under `keras.distribution`.
        self.prepare: Callable[[keras.Model], None] | None = None
        self._is_first_epoch = False
        self._local_keys: set[object] = set()
        if isinstance(local_variables, keras.Variable | tf.Variable):
            local_variables = [local_variables]
        for variable in local_variables or []:
            self.register_local_var(variable)

    def register_local_var(self, var: Variable) -> None:
        """Exclude `var` from the broadcast."""
        if not isinstance(var, keras.Variable | tf.Variable):
            raise ValueError(
                "Local variables must be Keras or TensorFlow variables. Received: "
                f"{var!r} of type {type(var).__name__}"
            )
        self._local_keys.add(variable_key(var))

    def set_model(self, model: keras.Model) -> None:
        if model is not self.model:
            self.broadcast_done = False
        super().set_model(model)
        configure_compiled_model(model)

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._is_first_epoch = True
        fit_start.check_distributed(self.model)
        is_built = self._agree_on_start()
        if self.broadcast_done:
            # Only an optimizer that reduces gradients keeps the ranks equal.
            if get_hook(self.model.optimizer):
                check_trained(
                    self.model,
                    local_keys=self._local_keys,
                    remedy=BROADCAST_AGAIN,
                    # A layer may have changed them in its call.
                    includes_untrained=False,
                )
            return
        if is_built:
            self._broadcast()
        elif type(self.model).call is not keras.Model.call:
            self._broadcast_on_first_batch()
        else:
            # For example a GAN, whose train_step calls its two models.
            unbuilt = fit_start.unbuilt_layers(self.model) or ["layers of other ranks"]
            raise ValueError(
                f"{type(self.model).__name__} has no call(): before the first step it "
                f"cannot be built. Build its layers before fit: {', '.join(unbuilt)}."
            )

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._check_first_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        # A callback may have compiled the model again. No collective: see `fit_start`.
        fit_start.check_distributed(self.model)

    def on_train_end(self, logs: dict | None = None) -> None:
        # A rank that has no epoch left takes part in the check of the others.
        self._check_first_epoch(None)

    def _agree_on_start(self) -> bool:
        # Returns whether the model is built on all ranks: a rank that broadcasts now
        # would block while another one waits for its first batch.
        process_set = get_training_ranks(self.model.optimizer)
        if not needs_communication(process_set):
            return fit_start.is_built(self.model)
        check_root(self.root_rank, process_set)
        check_synchronized(self.model, process_set)
        agreement = fit_start.agree(
            self.model,
            callback=self,
            needs_broadcast=not self.broadcast_done,
            root_rank=self.root_rank,
            process_set=process_set,
        )
        self.broadcast_done = not agreement.needs_broadcast
        return agreement.is_built

    def _check_first_epoch(self, epoch: int | None) -> None:
        if self._is_first_epoch:
            self._is_first_epoch = False
            fit_start.check_first_epoch(
                epoch, process_set=get_training_ranks(self.model.optimizer)
            )

    def _broadcast(self) -> None:
        model, optimizer = self.model, self.model.optimizer
        if self.prepare:
            self.prepare(model)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        hook = get_hook(optimizer)
        sharded_state = hook.sharded_state if hook else None
        if hook and sharded_state:
            # The last axis is `data`, along which the replicas differ in their root.
            _, root = hook.axes(self.root_rank)[-1]
            copies_weights = sharded_state.agree_on_start(root, hook.all_ranks)
        variables = non_local_variables(model, local_keys=self._local_keys)
        if is_sharded(model.variables) or (hook and hook.has_shared_replicas):
            # The ranks of a replica need equal seeds: its first rank's.
            variables += [*seed_states(model), global_seed_state()]
        groups = list(replicated_by_process_set(optimizer, variables, self.root_rank))
        for process_set, _, replicated in groups:
            _check_same_structure(replicated, process_set)
        # No broadcast has what is in no variable; and it would hide that ranks have
        # adapted a `Normalization` to different samples.
        check_model(model, (), local_keys=self._local_keys, precedes_broadcast=True)
        for process_set, root, replicated in groups:
            with tf.device(self.device):
                for part in _split(replicated):
                    ops.broadcast_variables(part, root, process_set)
        if sharded_state and copies_weights:
            sharded_state.copy_weights()
        separate_seeds(seed_states(model), get_process_set(optimizer))
        layer_state.refresh(model)
        self._warn_of_moving_statistics()
        self.broadcast_done = True

    def _warn_of_moving_statistics(self) -> None:
        optimizer = self.model.optimizer
        process_set = get_process_set(optimizer)
        # A rank outside of the set has no rank in it.
        is_alone = not needs_communication(process_set)
        # `keras.distribution` makes them equal on all ranks.
        if is_alone or self.prepare or _AVERAGING in fit_start.shared_callbacks(self):
            return
        if process_set.rank() != 0:
            return
        # A frozen one normalizes by its statistics, and does not update them.
        names = [
            layer.name
            for layer in local_normalizations(
                self.model, process_set, get_local_keys(optimizer)
            )
            if layer.trainable
        ]
        if names:
            warnings.warn(
                "BatchNormalization updates its moving statistics from the batches of "
                "its own rank: evaluations, and the model that rank 0 saves, depend on "
                f"the rank. Received {len(names)} such layer{'s' * (len(names) > 1)}, "
                f"{names[0]} the first. Use hvd.SyncBatchNormalization, or add "
                f"hvd.callbacks.{_AVERAGING}() on every rank.",
                stacklevel=2,
            )

    def _broadcast_on_first_batch(self) -> None:
        # fit builds such a model inside its first step, which is too late: build the
        # model for the first batch, broadcast, then pass the batch to the step.
        def first_step(iterator: Iterator) -> dict:
            fit_start.restore(self.model)
            batch = next(iterator)
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            fit_start.build(self.model, self.model, inputs)
            self._broadcast()
            assert self.model.train_function  # `fit` has made it.
            return self.model.train_function(itertools.chain([batch], iterator))

        fit_start.substitute(self.model, first_step)


class _Described(NamedTuple):
    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.path} is {self.dtype}{list(self.shape)}"


def _check_same_structure(
    variables: Sequence[keras.Variable], process_set: ProcessSet
) -> None:
    # Otherwise a rank blocks in the broadcast of a tensor that another does not have.
    described = [_Described(v.path, tuple(v.shape), v.dtype) for v in variables]
    described_by_rank = allgather_object(
        described, name="BroadcastStructure", process_set=process_set
    )
    counts = group_by_value(list(map(len, described_by_rank)), process_set.ranks)
    if len(counts) > 1:
        raise ValueError(
            "The ranks' models differ: the number of variables to broadcast is "
            f"{name_values(counts)}. Build and compile the same model on every rank."
        )
    for by_rank in zip(*described_by_rank, strict=True):
        groups = group_by_value(by_rank, process_set.ranks, key=lambda v: v[1:])
        if len(groups) > 1:
            raise ValueError(
                f"The ranks' models differ: {name_values(groups)}. Build and compile "
                "the same model on every rank."
            )


def _split(variables: Sequence[Variable]) -> Iterator[list[Variable]]:
    """Yield the variables in lists of at most `_BROADCAST_BYTES`, or of one."""
    part: list[Variable] = []
    size = 0
    for variable in variables:
        elements = math.prod(variable.shape)
        added = elements * tf.as_dtype(variable.dtype).size
        if part and size + added > _BROADCAST_BYTES:
            yield part
            part, size = [], 0
        part.append(variable)
        size += added
    if part:
        yield part
