"""What the kinds of parallelism of a workload have in common."""

import dataclasses
import math
from collections.abc import Callable

# Of each rank; their bytes and losses are averaged.
BATCHES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of parallelism, in which a workload is trained.

    Attributes:
        build: `build(options)` returns a compiled model whose optimizer is distributed.
            Initial weights are those of the dense model with the seed of the options.
        shares_samples: whether each rank trains with the samples of all ranks, as the
            ranks of a model group do. If not, it trains with its own.
        most_ranks: the kind is left out with more.
    """

    build: Callable
    shares_samples: bool = False
    most_ranks: float = math.inf
