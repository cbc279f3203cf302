"""What a verification has recorded of a script whose steps differ."""

import dataclasses
from collections.abc import Sequence

from hvdtrain.verify import gradient_norms
from hvdtrain.verify.comparison import Difference
from hvdtrain.verify.samples import Samples
from hvdtrain.verify.trajectory import Facts, State

# A difference in relation to the largest value, beyond which it is no rounding.
_SMALL = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was recorded of a script whose steps differ from the reference.

    Attributes:
        difference: the first one.
        facts_by_rank: facts of the script on each rank.
        reference_by_rank: facts of the reference, where ranks have the same weights
            and batches.
        states_by_rank: the states after the step of this difference.
    """

    difference: Difference
    facts_by_rank: Sequence[Facts]
    reference_by_rank: Sequence[Facts]
    samples: Samples
    states_by_rank: Sequence[State]

    @property
    def facts(self) -> Facts:
        """The facts of rank 0."""
        return self.facts_by_rank[0]

    @property
    def is_small(self) -> bool:
        """Whether the difference may be rounding."""
        norms = self.reference_by_rank[0].gradients
        # An optimizer may make full steps of a gradient that is rounding.
        is_rounding = gradient_norms.is_rounding(norms, self.difference.name)
        return self.difference.relative < _SMALL or is_rounding

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.facts_by_rank)

    @property
    def operations(self) -> set[str]:
        """The operations by which gradients are reduced."""
        return {operation for operation, _ in self.facts.reductions.kinds}
