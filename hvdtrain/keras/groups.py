"""Which gradients are reduced together."""

import itertools
import math
import warnings

import tensorflow as tf

from hvdtrain.keras.optimizer_state import variable_key

# Smaller groups cost more barriers or negotiations; larger ones start later, and leave
# less of the backward pass to overlap with.
_GROUP_BYTES = 16 << 20
_FIRST_GROUP_BYTES = 4 << 20


def split(places, variables, groups):
    """Returns the groups of some variables, as lists of their places.

    Args:
        places: places in `variables`.
        variables: list of variables.
        groups: see `GradientOptions`.
    """
    if groups is None:
        return _split_by_bytes(places, variables)
    if isinstance(groups, int):
        count = min(groups, len(places))
        bounds = [len(places) * i // count for i in range(count + 1)]
        return [places[a:b] for a, b in itertools.pairwise(bounds)]
    group_of = {
        variable_key(variable): number
        for number, group in enumerate(groups)
        for variable in group
    }
    by_group = {}
    for i in places:
        key = variable_key(variables[i])
        by_group.setdefault(group_of.get(key, key), []).append(i)
    return list(by_group.values())


def _split_by_bytes(places, variables):
    """Returns groups of about equal bytes, decided from shapes and dtypes alone.

    The gradients of the first variables are computed last. No backward pass is left to
    hide their reduction, so their group is smaller.
    """
    sizes = [_gradient_bytes(variables[i]) for i in places]
    if sum(sizes) <= _GROUP_BYTES:
        return [places]
    groups = {}
    starts = itertools.accumulate(sizes, initial=0)
    for i, start in zip(places, starts, strict=False):
        number = 1 + (start - _FIRST_GROUP_BYTES) // _GROUP_BYTES
        groups.setdefault(number, []).append(i)
    return list(groups.values())


def bytes_of_groups(variables):
    """Returns the bytes of each group of gradients, in the order of their reduction."""
    by_place = _split_by_bytes(range(len(variables)), variables)
    return [
        sum(_gradient_bytes(variables[i]) for i in places)
        for places in reversed(by_place)
    ]


def _gradient_bytes(variable):
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def groups_argument(groups, num_groups):
    """Returns the argument `groups`, also where its deprecated name was used."""
    if num_groups:
        # The line of the caller of the function that has these arguments.
        warnings.warn(
            "num_groups is deprecated: use groups.", DeprecationWarning, stacklevel=3
        )
    return groups if groups is not None else num_groups or None


def check_groups(groups):
    """Raises a ValueError for an argument `groups` of no meaning."""
    is_count = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    is_nested = isinstance(groups, list) and all(
        isinstance(group, list | tuple) for group in groups
    )
    if groups is not None and not is_count and not is_nested:
        raise ValueError(
            "groups must be None, a positive number of groups, or a list of lists of "
            f"variables. Received: {groups!r}"
        )
