"""The likely reason why N ranks do not compute what one process computes.

The reasons are the conditions of "When N ranks equal one process" in the documents, and
frequent mistakes in scripts.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from hvdtrain.verify.comparison import Difference
from hvdtrain.verify.samples import Samples
from hvdtrain.verify.trajectory import Facts, State, digest

_RATIO_TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was recorded of a script whose steps differ from the reference.

    Attributes:
        difference: the first one.
        facts_by_rank: facts of the script on each rank.
        states_by_rank: the states after the step of this difference.
    """

    difference: Difference
    facts_by_rank: Sequence[Facts]
    samples: Samples
    states_by_rank: Sequence[State]

    @property
    def facts(self) -> Facts:
        """The facts of rank 0."""
        return self.facts_by_rank[0]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.facts_by_rank)

    @property
    def operations(self) -> set[str]:
        """The operations by which gradients are reduced."""
        return {operation for operation, _ in self.facts.reductions.kinds}


def find(evidence: Evidence) -> list[str]:
    """Return the reasons that fit the evidence, the most likely one first."""
    found = [cause(evidence) for cause in _CAUSES]
    return [text for text in found if text]


def is_explained(evidence: Evidence) -> bool:
    """Return whether a reason was found without which the steps would be equal.

    Other reasons may be there and have no effect, such as masks that leave equally many
    steps; the difference may be rounding.
    """
    return any(cause(evidence) for cause in _SUFFICIENT)


def _no_reduction(evidence: Evidence) -> str:
    if evidence.facts.reductions.kinds or evidence.facts.reductions.is_by_script:
        return ""
    return (
        "No gradient is reduced over the ranks: wrap the optimizer by "
        "hvd.DistributedOptimizer, or the tape by hvd.DistributedGradientTape."
    )


def _late_broadcast(evidence: Evidence) -> str:
    first, *others = (facts.reductions.weights for facts in evidence.facts_by_rank)
    if all(other == first for other in others):
        return ""
    return (
        "The ranks computed their first gradients with different weights: build the "
        "model, and broadcast the weights, before the first step."
    )


def _rates_differ(evidence: Evidence) -> str:
    rates = [state.learning_rates for state in evidence.states_by_rank]
    for name in rates[0]:
        values = [rate.get(name) for rate in rates]
        if len(set(values)) > 1:
            listed = ", ".join(f"{value or 0:.6g}" for value in values)
            return (
                f"The learning rate of {name!r} differs by rank: {listed}. Set it on "
                "all ranks, also in callbacks."
            )
    return ""


def _learned_apart(evidence: Evidence) -> str:
    first, *others = (facts.learned for facts in evidence.facts_by_rank)
    names = [
        name
        for name, text in first.items()
        if any(other.get(name, text) != text for other in others)
    ]
    if not names:
        return ""
    return (
        f"The ranks differ in {_listed(names[:3])}: adapt layers to the same samples "
        "on every rank, before the first step."
    )


def _unequal_batches(evidence: Evidence) -> str:
    sizes = evidence.samples.sizes
    if len(set(sizes)) < 2:
        return ""
    return (
        f"The batches of the ranks have {_listed(sizes)} samples, and each rank's mean "
        "has the same weight: drop the rest of the data, or deal them evenly."
    )


def _sum_of_losses(evidence: Evidence) -> str:
    if "sum" not in evidence.facts.loss_reductions or "Sum" in evidence.operations:
        return ""
    return (
        'A loss has reduction="sum", and the mean over ranks is 1 / '
        f"{evidence.size} of the sum: pass op=hvd.Sum, or use "
        '"sum_over_batch_size".'
    )


def _sum_of_means(evidence: Evidence) -> str:
    means = {"sum_over_batch_size", "mean"} & {*evidence.facts.loss_reductions}
    if "Sum" not in evidence.operations or not means:
        return ""
    return (
        "Gradients of means over samples are added up by op=hvd.Sum, which makes them "
        f"{evidence.size} times as large: use op=hvd.Average."
    )


def _sum_of_penalties(evidence: Evidence) -> str:
    names = evidence.facts.regularized_layers
    if "Sum" not in evidence.operations or not names:
        return ""
    return (
        f"{_listed(names[:3])} adds a regularizer, or another loss that is no sum over "
        f"samples, and op=hvd.Sum adds it {evidence.size} times: use op=hvd.Average "
        "and a mean loss, or divide sum(model.losses) by hvd.size()."
    )


def _batch_losses(evidence: Evidence) -> str:
    names = evidence.facts.batch_losses
    if not names:
        return ""
    return (
        f"The loss {_listed(names[:3])} of a batch is no mean over its samples, and "
        "the mean over ranks is another number: compute it for each sample, such as "
        "Dice(axis=(1, 2, 3)), or of hvd.allgather(y_true) and hvd.allgather(y_pred)."
    )


def _adasum(evidence: Evidence) -> str:
    if "Adasum" not in evidence.operations:
        return ""
    return (
        "op=hvd.Adasum combines gradients by their angles, which has no equivalent in "
        "one process: use op=hvd.Average to compare."
    )


def _multiple(evidence: Evidence) -> str:
    size, ratio = evidence.size, evidence.difference.ratio
    for factor, text in ((size, f"{size}"), (1 / size, f"1 / {size}")):
        if math.isclose(ratio, factor, rel_tol=_RATIO_TOLERANCE):
            return (
                f"The change since the start is {text} of the reference's: a loss or "
                "gradient is multiplied or divided by the number of ranks, or summed "
                "where it should be averaged."
            )
    return ""


def _weighted_mean(evidence: Evidence) -> str:
    if "mean_with_sample_weight" not in evidence.facts.loss_reductions:
        return ""
    return (
        'A loss has reduction="mean_with_sample_weight", and each rank divides by its '
        'own sum of weights: use "sum_over_batch_size".'
    )


def _local_moments(evidence: Evidence) -> str:
    names = evidence.facts.local_normalizations
    if not names:
        return ""
    return (
        f"{_listed(names[:3])} normalizes by the moments of the local batch: use "
        "hvd.SyncBatchNormalization."
    )


def _random_draws(evidence: Evidence) -> str:
    # Dropout draws nothing here.
    names = [name for name, count in evidence.states_by_rank[0].draws.items() if count]
    if not names:
        return ""
    return (
        f"{_listed(names[:3])} draws random numbers, others for each batch and rank: "
        "the distribution is that of one process, the numbers are not. Verify the "
        "script without this layer."
    )


def _masks(evidence: Evidence) -> str:
    names = evidence.facts.masking_layers
    if not names:
        return ""
    return (
        f"{_listed(names[:3])} makes masks, and each rank divides by its own number of "
        "unmasked steps: make batches with equally many, or pass sample_weight."
    )


def _reduced_by_script(evidence: Evidence) -> str:
    if not evidence.facts.reductions.is_by_script:
        return ""
    return (
        "The script calls hvd.allreduce itself. In one process this returns its "
        "argument: a sum that the script divides by hvd.size() differs. Use "
        "op=hvd.Average, or hvd.DistributedGradientTape."
    )


def _dense_rows(evidence: Evidence) -> str:
    if not evidence.facts.reductions.has_dense_rows:
        return ""
    return (
        "sparse_as_dense=True adds up the gradients of equal rows before the "
        "optimizer, which Keras does not do in one process: leave it out."
    )


def _compression(evidence: Evidence) -> str:
    names = {name for _, name in evidence.facts.reductions.kinds} - {"NoneCompressor"}
    if not names:
        return ""
    return f"Gradients are rounded by {_listed(sorted(names))} before the reduction."


def _ranks_differ(evidence: Evidence) -> str:
    first, *others = (state.variables for state in evidence.states_by_rank)
    for name, value in first.items():
        if any(other.get(name) != digest(value) for other in others):
            return (
                f"{name} is not equal on all ranks after the step: some of its changes "
                "are not reduced, or depend on the rank."
            )
    return ""


def _listed(values: Sequence[object]) -> str:
    return " and ".join(map(str, values))


# The most likely one first.
_CAUSES: tuple[Callable[[Evidence], str], ...] = (
    _no_reduction,
    _late_broadcast,
    _rates_differ,
    _learned_apart,
    _unequal_batches,
    _sum_of_losses,
    _sum_of_means,
    _sum_of_penalties,
    _batch_losses,
    _adasum,
    _reduced_by_script,
    _multiple,
    _weighted_mean,
    _local_moments,
    _random_draws,
    _masks,
    _dense_rows,
    _compression,
    _ranks_differ,
)
# Found only where they have an effect.
_SUFFICIENT = (
    _no_reduction,
    _late_broadcast,
    _rates_differ,
    _learned_apart,
    _unequal_batches,
    _adasum,
    _multiple,
)
