"""What differs by rank in the state of a training, back into the ranks."""

import numpy as np

from hvdtrain.collectives.objects import broadcast_object, scatter_object
from hvdtrain.keras.callbacks.broadcast import separate_seeds
from hvdtrain.keras.optimizer_state import accumulated_gradients
from hvdtrain.training import random_states, state


class PerRankState:
    """The arrays of a checkpoint that differ by rank, for this rank. A collective.

    Where the number of ranks has changed: accumulated gradients become their mean, so
    that their window gives the same update; ranks take the moving statistics of the
    rank with their number, or of rank 0, as the seeds, which are then separated; the
    states of metrics are divided so that their reduction has the same result; and the
    global random generators are left as they are.

    Args:
        world: the `World`.
        arrays: those of a checkpoint on the chief; None elsewhere.
        local_batch_sizes: samples in a batch of each rank that wrote them.
    """

    def __init__(self, world, arrays, local_batch_sizes):
        self._local_batch_sizes, self._rank = local_batch_sizes, world.rank
        self._is_same_size = len(local_batch_sizes) == world.size
        everyone = None
        if world.is_chief:
            size_before = len(local_batch_sizes)
            everyone = [_of_rank(arrays, rank) for rank in range(size_before)]
        if self._is_same_size:
            self._states = [scatter_object(everyone, name="PerRankState")]
        else:
            self._states = broadcast_object(everyone, name="PerRankState")

    def assign(self, model):
        """Assign all but the states of metrics. A collective, after the broadcast."""
        if self._is_same_size:
            (mine,) = self._states
            state.assign(state.per_rank_variables(model), mine["rank"])
            return
        before = self._states[self._rank if self._rank < len(self._states) else 0]
        state.assign(state.per_rank_variables(model), before["rank"])
        self._average_accumulated(model)
        separate_seeds(model)

    def restore_generators(self):
        """Restore the global random generators of this rank."""
        if self._is_same_size:
            (mine,) = self._states
            random_states.restore(mine["random"])

    def assign_metrics(self, model):
        """Assign the states of metrics."""
        variables = state.metric_variables_of(model)
        states = [each["metrics"] for each in self._states]
        if self._is_same_size:
            (values,) = states
        else:
            by_variable = zip(variables, *states, strict=True)
            values = [self._combined(variable, each) for variable, *each in by_variable]
        state.assign(variables, values)

    def release(self):
        """Give back the memory: nothing is assigned any more."""
        self._states = None

    def _combined(self, variable, states):
        # So that their reduction over the new ranks has the result of the old ones.
        if variable.aggregation == "mean":
            return _mean(states)
        if variable.aggregation == "only_first_replica":
            return states[0]
        total = np.sum(states, axis=0, dtype=states[0].dtype)
        return total if self._rank == 0 else np.zeros_like(total)

    def _average_accumulated(self, model):
        accumulated = {id(v) for v in accumulated_gradients(model.optimizer)}
        for i, variable in enumerate(state.per_rank_variables(model)):
            if id(variable) in accumulated:
                sums = [each["rank"][i] for each in self._states]
                variable.assign(_mean(sums, weights=self._local_batch_sizes))


def _of_rank(arrays, rank):
    return {
        "rank": state.ordered(arrays, f"rank{rank}"),
        "metrics": state.ordered(arrays, f"metrics{rank}"),
        "random": state.by_name(arrays, f"random{rank}"),
    }


def _mean(values, weights=None):
    # NumPy computes no mean of bfloat16.
    mean = np.average([each.astype("float64") for each in values], 0, weights)
    return np.asarray(mean).astype(values[0].dtype)
