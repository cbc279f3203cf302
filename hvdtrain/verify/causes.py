"""The likely reason why N ranks do not compute what one process computes.

The reasons are the conditions of "When N ranks equal one process" in the documents, and
frequent mistakes in scripts.
"""

import math
from collections.abc import Callable

from hvdtrain.verify import rank_values
from hvdtrain.verify.evidence import Evidence
from hvdtrain.verify.gradient_norms import differ_by_rank
from hvdtrain.verify.rank_values import listed
from hvdtrain.verify.trajectory import digest

_RATIO_TOLERANCE = 0.02


def find(evidence: Evidence) -> list[str]:
    """Return the reasons that fit the evidence, the most likely one first."""
    found = [cause(evidence) for cause in _CAUSES]
    return [text for text in found if text]


def is_explained(evidence: Evidence, *, by_size: bool = True) -> bool:
    """Return whether a reason was found without which the steps would be equal.

    Other reasons may be there and have no effect, such as masks that leave equally many
    steps; the difference may be rounding.

    Args:
        by_size: whether a multiple of the reference is such a reason. It is none where
            the script divides by `hvd.size()` in the reference as well.
    """
    found = [cause for cause in _SUFFICIENT if cause(evidence)]
    return bool(found if by_size else {*found} - {_multiple})


def _no_reduction(evidence: Evidence) -> str:
    if evidence.facts.reductions.kinds or evidence.facts.reductions.is_by_script:
        return ""
    return (
        "No gradient is reduced over the ranks: wrap the optimizer by "
        "hvd.DistributedOptimizer, or the tape by hvd.DistributedGradientTape."
    )


def _unreduced(evidence: Evidence) -> str:
    reductions = evidence.facts.reductions
    trained = evidence.facts.trained
    names = [name for name in trained if name not in reductions.names]
    if evidence.facts.unreduced:
        return (
            f"The gradients of the optimizer {listed(evidence.facts.unreduced)} are "
            "not reduced over the ranks, others are: wrap each optimizer by "
            "hvd.DistributedOptimizer, also for a second compile."
        )
    # A script may reduce any tensor, and a tape may have sources of another name.
    is_known = reductions.kinds and reductions.names <= {*trained}
    if not (names and is_known) or reductions.is_by_script:
        return ""
    return (
        f"The gradients of {listed(names[:3])} are not reduced over the ranks, others "
        "are: wrap each optimizer by hvd.DistributedOptimizer, or each tape by "
        "hvd.DistributedGradientTape."
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
            numbers = ", ".join(f"{value or 0:.6g}" for value in values)
            return (
                f"The learning rate of {name!r} differs by rank: {numbers}. Set it on "
                "all ranks, also in callbacks."
            )
    return ""


def _learned_apart(evidence: Evidence) -> str:
    return rank_values.unequal_learned(evidence.facts_by_rank)


def _class_weights(evidence: Evidence) -> str:
    return rank_values.unequal_class_weights(evidence.facts_by_rank)


def _untrained_names(evidence: Evidence, *, of_layers: bool) -> list[str]:
    """Return weights that are not trained and differ, made as such by layers or not."""
    first, *others = (facts.untrained for facts in evidence.facts_by_rank)
    made = evidence.facts.made_untrained
    return [
        name
        for name in first
        if (name in made) is of_layers
        and any(each.get(name) != first[name] for each in others)
    ]


def _layers_update(evidence: Evidence) -> str:
    names = _untrained_names(evidence, of_layers=True)
    if not names:
        return ""
    return (
        f"{listed(names[:3])} of a layer is not equal on all ranks after the first "
        "step. Reduce by hvd.allreduce what the layer adds to it in its call; if the "
        "call does not change it, broadcast model.variables before the first step."
    )


def _untrained_apart(evidence: Evidence) -> str:
    names = _untrained_names(evidence, of_layers=False)
    if not names:
        return ""
    return (
        f"{listed(names[:3])} is not trained, and not equal on all ranks: broadcast "
        "model.variables, not model.trainable_variables, before the first step."
    )


def _unequal_batches(evidence: Evidence) -> str:
    sizes = evidence.samples.sizes
    if len(set(sizes)) < 2:
        return ""
    return (
        f"The batches of the ranks have {listed(sizes)} samples, and each rank's mean "
        "has the same weight: drop the rest of the data, or deal them evenly."
    )


def _sum_of_losses(evidence: Evidence) -> str:
    if "sum" not in evidence.facts.loss_reductions or "Sum" in evidence.operations:
        return ""
    return (
        'A loss has reduction="sum" or None, and the mean over ranks is 1 / '
        f"{evidence.size} of the sum: pass op=hvd.Sum, or use "
        '"sum_over_batch_size".'
    )


def _sum_of_means(evidence: Evidence) -> str:
    has_mean = "mean" in evidence.facts.loss_reductions
    if "Sum" not in evidence.operations or not has_mean:
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
        f"{listed(names[:3])} adds a regularizer, or another loss that is no sum over "
        f"samples, and op=hvd.Sum adds it {evidence.size} times: use op=hvd.Average "
        "and a mean loss, or divide sum(model.losses) by hvd.size()."
    )


def _batch_losses(evidence: Evidence) -> str:
    names = evidence.facts.batch_losses
    if not names:
        return ""
    return (
        f"The loss {listed(names[:3])} of a batch is no mean over its samples, and "
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


def _clipped(evidence: Evidence) -> str:
    if not evidence.facts.reductions.is_clipped:
        return ""
    return (
        "The script clips gradients before they are reduced, each rank its own: clip "
        "the result of hvd.DistributedGradientTape, or pass clipnorm, global_clipnorm "
        "or clipvalue to the optimizer, which clips after the reduction."
    )


def _multiple(evidence: Evidence) -> str:
    size = evidence.size
    factors = {
        f"{size}": size,
        f"1 / {size}": 1 / size,
        # Of a mean of squares.
        f"{size**2}": size**2,
        f"1 / {size**2}": 1 / size**2,
    }
    for text, factor in factors.items():
        if _is_ratio(evidence, factor):
            return (
                f"The change since the start is {text} of the reference's: a loss or "
                "gradient is multiplied or divided by the number of ranks, or summed "
                "where it should be averaged."
            )
    return ""


def _is_ratio(evidence: Evidence, factor: float) -> bool:
    ratio = evidence.difference.ratio
    return math.isclose(ratio, factor, rel_tol=_RATIO_TOLERANCE)


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
        f"{listed(names[:3])} normalizes by the moments of the local batch: use "
        "hvd.SyncBatchNormalization."
    )


def _random_draws(evidence: Evidence) -> str:
    # Dropout draws nothing here.
    names = evidence.reference_by_rank[0].other_draws
    if not names:
        return ""
    return (
        f"{listed(names[:3])} draws random numbers, others for each batch and rank: "
        "the distribution is that of one process, the numbers are not. Verify the "
        "script without this layer."
    )


def _depends_on_rank(evidence: Evidence) -> str:
    if not differ_by_rank([each.gradients for each in evidence.reference_by_rank]):
        return ""
    reason = _constant(evidence)
    return f"With equal weights and batches, gradients differ by rank: {reason}"


def _constant(evidence: Evidence) -> str:
    first, *others = (facts.reductions.constants for facts in evidence.facts_by_rank)
    for name, text in first.items():
        values = [text, *(each.get(name, text) for each in others)]
        if len(set(values)) > 1:
            return (
                f"a constant of the step ({name}) is {listed(values)}. Make it the "
                "same on all ranks, such as by hvd.broadcast_object."
            )
    return (
        "the loss or the model reads hvd.rank(), a number that is not equal on all "
        "ranks, or random numbers that the script draws. Make numbers equal, such as "
        "by hvd.broadcast_object; for random ones, verify the script without them."
    )


def _masks(evidence: Evidence) -> str:
    names = evidence.facts.masking_layers
    if not names:
        return ""
    return (
        f"{listed(names[:3])} makes masks, and each rank divides by its own number of "
        "unmasked steps: make batches with equally many, or pass sample_weight."
    )


def _reduced_by_script(evidence: Evidence) -> str:
    reductions = evidence.facts.reductions
    if not reductions.is_by_script:
        return ""
    if reductions.has_sums and _is_ratio(evidence, evidence.size):
        return (
            "The script adds up gradients by hvd.allreduce with op=hvd.Sum, which is "
            f"{evidence.size} times their mean: use op=hvd.Average, or "
            "hvd.DistributedGradientTape."
        )
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
    return f"Gradients are rounded by {listed(sorted(names))} before the reduction."


def _ranks_differ(evidence: Evidence) -> str:
    first, *others = (state.variables for state in evidence.states_by_rank)
    for name, value in first.items():
        if any(other.get(name) != digest(value) for other in others):
            return (
                f"{name} is not equal on all ranks after the step: some of its changes "
                "are not reduced, or depend on the rank. Reduce them by hvd.allreduce, "
                "and give the optimizer the same arguments on all ranks."
            )
    return ""


# The most likely one first.
_CAUSES: tuple[Callable[[Evidence], str], ...] = (
    _no_reduction,
    _unreduced,
    _late_broadcast,
    _rates_differ,
    _learned_apart,
    _class_weights,
    _layers_update,
    _untrained_apart,
    _unequal_batches,
    _sum_of_losses,
    _sum_of_means,
    _sum_of_penalties,
    _batch_losses,
    _adasum,
    _clipped,
    _reduced_by_script,
    _multiple,
    _weighted_mean,
    _local_moments,
    _random_draws,
    _depends_on_rank,
    _masks,
    _dense_rows,
    _compression,
    _ranks_differ,
)
# Found only where they have an effect.
_SUFFICIENT = (
    _no_reduction,
    _unreduced,
    _late_broadcast,
    _rates_differ,
    _learned_apart,
    _class_weights,
    # The weight itself differs from that of one process.
    _layers_update,
    _unequal_batches,
    _adasum,
    _multiple,
    _depends_on_rank,
)
