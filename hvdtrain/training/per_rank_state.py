"""What differs by rank in the state of a training, back into the ranks."""

import numpy as np

from hvdtrain.collectives.objects import broadcast_object, scatter_object
from hvdtrain.keras.callbacks.broadcast import separate_seeds
from hvdtrain.keras.metrics import metric_variables
from hvdtrain.keras.ranks import process_set_of
from hvdtrain.training import random_states, state
from hvdtrain.training.regrouping import mean
from hvdtrain.training.state_variables import StateVariables, assign


class PerRankState:
    """The arrays of a checkpoint that differ by rank, for this rank. A collective.

    Where the number of ranks has changed: accumulated gradients become their mean, so
    that their window gives the same update; ranks take the moving statistics of the
    rank with their number, or of rank 0, as the seeds, which are then separated; the
    states of metrics are divided so that their reduction has the same result; and the
    global random generators are left as they are.

    Of a model that is divided over ranks, all of this holds for its replicas: the
    ranks of one take the same state, and their parts of it.

    Args:
        world: the `World`.
        replicas: the `Replicas`.
        arrays: those of a checkpoint on the chief; None elsewhere.
        local_batch_sizes: samples in a batch of each replica that wrote them.
    """

    def __init__(self, world, replicas, arrays, local_batch_sizes):
        self._local_batch_sizes, self._index = local_batch_sizes, replicas.index
        self._is_same_size = len(local_batch_sizes) == replicas.size
        everyone = None
        if world.is_chief:
            size_before = len(local_batch_sizes)
            everyone = [_of_replica(arrays, number) for number in range(size_before)]
        if self._is_same_size:
            if everyone:
                everyone = [
                    each for n, each in enumerate(everyone) for _ in replicas.ranks(n)
                ]
            self._states = [scatter_object(everyone, name="PerRankState")]
        else:
            self._states = broadcast_object(everyone, name="PerRankState")

    def assign(self, model):
        """Assign all but the states of metrics. A collective, after the broadcast."""
        variables = StateVariables.of(model)
        per_replica = list(variables.per_replica.values())
        if self._is_same_size:
            (mine,) = self._states
            assign(per_replica, mine["rank"])
            return
        before = self._states[self._index if self._index < len(self._states) else 0]
        assign(per_replica, before["rank"])
        self._average_accumulated(variables)
        separate_seeds(model, process_set_of(model.optimizer))

    def restore_generators(self):
        """Restore the global random generators of this rank."""
        if self._is_same_size:
            (mine,) = self._states
            random_states.restore(mine["random"])

    def assign_metrics(self, model):
        """Assign the states of metrics."""
        variables = metric_variables(model.metrics)
        states = [each["metrics"] for each in self._states]
        if self._is_same_size:
            (values,) = states
        else:
            by_variable = zip(variables, *states, strict=True)
            values = [self._combined(variable, each) for variable, *each in by_variable]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def release(self):
        """Give back the memory: nothing is assigned any more."""
        self._states = None

    def _combined(self, variable, states):
        # So that their reduction over the new ranks has the result of the old ones.
        if variable.aggregation == "mean":
            return mean(states)
        if variable.aggregation == "only_first_replica":
            return states[0]
        total = np.sum(states, axis=0, dtype=states[0].dtype)
        return total if self._index == 0 else np.zeros_like(total)

    def _average_accumulated(self, variables):
        for i, (number, described) in enumerate(variables.per_replica.items()):
            if number in variables.accumulated:
                sums = [each["rank"][i] for each in self._states]
                assign([described], [mean(sums, weights=self._local_batch_sizes)])


def _of_replica(arrays, number):
    return {
        "rank": state.ordered(arrays, f"rank{number}"),
        "metrics": state.ordered(arrays, f"metrics{number}"),
        "random": state.by_name(arrays, f"random{number}"),
    }
