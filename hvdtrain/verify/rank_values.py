"""Values that ranks must have in common, or not, though their steps are equal.

The one process computes with the batches and the weights of the ranks. What a rank
computes of its own samples before, or decides after the steps, it has as well.
"""

import collections
import math
from collections.abc import Collection, Mapping, Sequence

from hvdtrain.verify.trajectory import Facts

# By the name of a metric, its values at the ends of epochs.
Monitored = Mapping[str, Sequence[float]]

_TOLERANCE = 1e-5


def unequal_learned(facts_by_rank: Sequence[Facts]) -> str:
    """Return which layers were adapted to other samples on each rank, or ""."""
    first, *others = (facts.learned for facts in facts_by_rank)
    names = [
        name
        for name, text in first.items()
        if any(other.get(name, text) != text for other in others)
    ]
    if not names:
        return ""
    return (
        f"The ranks differ in {listed(names[:3])}: adapt layers to the same samples "
        "on every rank, before the first step."
    )


def unequal_class_weights(facts_by_rank: Sequence[Facts]) -> str:
    """Return how the argument `class_weight` differs by rank, or ""."""
    texts = [facts.class_weights or "no weights" for facts in facts_by_rank]
    if len(set(texts)) < 2:
        return ""
    return (
        f"class_weight differs by rank: {listed(texts)}. Compute it of the labels of "
        "all ranks, such as of hvd.allgather(labels)."
    )


def equal_seeds(facts_by_rank: Sequence[Facts]) -> str:
    """Return which layers draw the same numbers on several ranks, or ""."""
    seeds_by_rank = [facts.seeds for facts in facts_by_rank]
    names = [
        name
        for name in seeds_by_rank[0]
        if len({seeds.get(name, -1 - rank) for rank, seeds in enumerate(seeds_by_rank)})
        < len(seeds_by_rank)
    ]
    if not names:
        return ""
    return (
        f"The seeds of {listed(names[:3])} are equal on several ranks, which draw the "
        "same numbers: pass model.variables to hvd.broadcast_variables, not "
        "model.weights, which has no seeds."
    )


def unequal_monitored(monitored_by_rank: Sequence[Monitored]) -> str:
    """Return which value that a callback decides by differs by rank, or ""."""
    for name in monitored_by_rank[0]:
        values_by_rank = [each.get(name, ()) for each in monitored_by_rank]
        for values in zip(*values_by_rank, strict=False):
            first, *others = values
            if all(math.isclose(x, first, rel_tol=_TOLERANCE) for x in others):
                continue
            if all(math.isnan(value) for value in values):
                continue
            numbers = listed([f"{value:.6g}" for value in values])
            return (
                f"{name}, by which a callback decides, differs by rank: {numbers}. "
                "Pass hvd.callbacks.MetricAverageCallback() before this callback."
            )
    return ""


def common_files(paths_by_rank: Sequence[Collection[str]]) -> str:
    """Return which files several ranks write, or ""."""
    ranks = collections.Counter(path for paths in paths_by_rank for path in paths)
    common = sorted(path for path in ranks if ranks[path] > 1)
    if not common:
        return ""
    return (
        f"Several ranks write {listed(common[:3])}: write a file on rank 0 alone, if "
        "hvd.rank() == 0, or under another name on each rank."
    )


def listed(values: Sequence[object]) -> str:
    """Return values as words."""
    return " and ".join(map(str, values))
