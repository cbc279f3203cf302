"""A checkpoint of a table that is divided, for a model in which it is whole, and back.

A table that is divided over replicas is stored once, if frozen, as are its accumulated
gradients: sums over replicas. Of `keras.layers.Embedding`, and of a divided table on
one rank, these are stored for each replica: the gradients of its own loss.
"""

import numpy as np

from hvdtrain.training import state


def regrouped(arrays, variables, local_batch_sizes):
    """Return the arrays as a model with these variables would have written them.

    The update at the end of an accumulation window stays the same, to rounding.

    Args:
        arrays: those of a checkpoint.
        variables: the `StateVariables` of the model.
        local_batch_sizes: samples in a batch of each replica that wrote them.

    Raises:
        OtherModelError: replicas had different values of a frozen table that the model
            divides.
    """
    arrays = dict(arrays)
    replicas = [f"rank{number}" for number in range(len(local_batch_sizes))]
    once, per_replica = (
        _names_by_number(arrays, "tables"),
        _names_by_number(arrays, "rank0"),
    )
    replicated = _names_by_number(arrays, "replicated")
    for number in variables.tables.keys() & replicated.keys():
        name = replicated[number]
        arrays[f"tables/{name}"] = arrays.pop(f"replicated/{name}")
    for number in variables.tables.keys() & per_replica.keys():
        name = per_replica[number]
        values = [arrays.pop(f"{replica}/{name}") for replica in replicas]
        if number in variables.accumulated:
            total = mean(values, weights=local_batch_sizes) * len(values)
            arrays[f"tables/{name}"] = total.astype(values[0].dtype)
        else:
            arrays[f"tables/{name}"] = _common(values, name)
    for number in variables.per_replica.keys() & once.keys():
        name = once[number]
        value = arrays.pop(f"tables/{name}")
        if number not in variables.accumulated:
            arrays[f"replicated/{name}"] = value
            continue
        value = (value / len(replicas)).astype(value.dtype)
        arrays |= {f"{replica}/{name}": value for replica in replicas}
    return arrays


def mean(values, weights=None):
    """Return the mean of arrays, in their dtype."""
    # NumPy computes no mean of bfloat16.
    average = np.average([each.astype("float64") for each in values], 0, weights)
    return np.asarray(average).astype(values[0].dtype)


def _names_by_number(arrays, prefix):
    return {state.number_of(name): name for name in state.by_name(arrays, prefix)}


def _common(values, name):
    if any(not np.array_equal(value, values[0]) for value in values):
        raise state.OtherModelError(
            f"{name.partition('/')[2]} differed by rank, and the model divides it"
        )
    return values[0]
