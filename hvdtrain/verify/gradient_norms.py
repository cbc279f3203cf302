"""What the norms of the first gradients show, in the phases of a verification.

In the phase "reference" every rank has the weights and the batches of one process, so
that gradients which differ by rank show what the ranks do not have in common. In the
phase "alone" the script sees a job of one rank: gradients that are N times as large in
the reference show a loss that the script multiplies by the number of ranks.
"""

import math
from collections.abc import Mapping, Sequence

# Rounding of bfloat16, in which a model may compute.
_TOLERANCE = 0.02
# A gradient this much smaller than the largest one may be rounding.
_ROUNDING = 1e-4
# In float64, only a gradient that is zero by construction is this much smaller.
_ZERO = 1e-12


def factor_of_size(
    reference: Mapping[str, float], alone: Mapping[str, float], *, size: int
) -> float:
    """Return by what a script multiplies its gradients because of the number of ranks.

    Args:
        reference: norms of the gradients of all ranks' batches, where the script sees
            `size` ranks.
        alone: norms of the same gradients, where it sees one.

    Returns:
        `size` or 1 / `size`, if most gradients differ by it; else 1.
    """
    largest = max(alone.values(), default=0.0)
    ratios = [
        reference[name] / norm
        for name, norm in alone.items()
        if name in reference and norm > _ROUNDING * largest
    ]
    for factor in (float(size), 1 / size):
        # A penalty of the weights, which has no factor, outweighs the loss in some.
        same = [r for r in ratios if math.isclose(r, factor, rel_tol=_TOLERANCE)]
        if len(same) > len(ratios) / 2:
            return factor
    return 1.0


def is_rounding(norms: Mapping[str, float], name: str) -> bool:
    """Return whether the gradient of a variable may be nothing but rounding."""
    largest = max(norms.values(), default=0.0)
    return name in norms and norms[name] < _ROUNDING * largest


def zero_by_construction(norms: Mapping[str, float]) -> set[str]:
    """Return the variables whose gradients, in float64, are rounding."""
    largest = max(norms.values(), default=0.0)
    return {name for name, norm in norms.items() if norm < _ZERO * largest}


def differ_by_rank(norms_by_rank: Sequence[Mapping[str, float]]) -> bool:
    """Return whether ranks with equal weights and batches had other gradients."""
    first, *others = norms_by_rank
    largest = max(first.values(), default=0.0)
    return any(
        not math.isclose(
            norm, other.get(name, 0.0), rel_tol=1e-3, abs_tol=_ROUNDING * largest
        )
        for other in others
        for name, norm in first.items()
    )
