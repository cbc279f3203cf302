"""Check that the `op` of an optimizer fits the `reduction` of its losses.

Keras reduces the losses of the samples of a batch in one of these ways. With the right
`op`, the gradients of N ranks are those of one process with the N-times batch:

    reduction                        of a batch        op
    "sum_over_batch_size", "mean"    a mean            Average
    "sum"                            a sum             Sum
    "none", None                     a vector, of      Sum
                                     which Keras
                                     differentiates
                                     the sum
    "mean_with_sample_weight"        a weighted mean   none: each rank divides by its
                                                       own sum of weights
"""

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.collectives.transport import Reduction, Sum
from hvdtrain.keras.metrics import joined_samples, set_aggregation
from hvdtrain.keras.replication import get_hook
from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import find_optimizers

MEANS = ("sum_over_batch_size", "mean")
SUMS = ("sum", "none", None)
WEIGHTED_MEAN = "mean_with_sample_weight"


def find_kind(reduction: str | None) -> str:
    """Return "mean" or "sum" for a reduction that computes it, or the reduction."""
    if reduction in SUMS:
        return "sum"
    return "mean" if reduction in MEANS else str(reduction)


# A loss of `compile`, and its weight.
WeightedLoss = tuple[Any, float | None]


def find_mismatch(losses: Iterable[WeightedLoss], reduction: Reduction) -> str:
    """Return the text of an error about a loss that `reduction` does not fit, or "".

    A weight that multiplies a sum by the number of ranks, or divides a mean by it,
    makes a loss fit.
    """
    size, is_added = reduction.process_set.size(), reduction.op == Sum
    for loss, weight in losses:
        weight = 1.0 if weight is None else weight
        if not weight:
            continue
        how = getattr(loss, "reduction", MEANS[0])
        received = f"Received the loss {_name(loss)} with reduction={how!r}"
        if how == WEIGHTED_MEAN:
            return (
                f"{received}; expected reduction='sum_over_batch_size': each rank "
                "divides by its own sum of weights."
            )
        if how in SUMS and not is_added and weight < size:
            return (
                f"{received}; expected a mean over samples: with op=hvd.Average the "
                f"gradient of a sum is 1/{size} of what one process computes. Use "
                "reduction='sum_over_batch_size', or for losses that are sums "
                "hvd.DistributedOptimizer(optimizer, op=hvd.Sum)."
            )
        is_mean = how in MEANS and _is_of_keras(loss)
        if is_mean and is_added and weight > 1 / size:
            return (
                f"{received}; expected a sum over samples: with op=hvd.Sum the "
                f"gradient of a mean is {size} times what one process computes. Use "
                "op=hvd.Average, or reduction='sum'."
            )
    return ""


def find_batch_losses(losses: Iterable[WeightedLoss]) -> list[str]:
    """Return the texts of warnings about losses of several samples."""
    return [
        f"The loss {_name(loss)} is computed of the samples of a batch ({joined}), by "
        "each rank from its own batch: the mean over ranks is not the loss of one "
        "process. Compute it of each sample, such as Dice(axis=(1, 2, 3)), or of "
        "hvd.allgather(y_true) and hvd.allgather(y_pred)."
        for loss, weight in losses
        if weight != 0 and (joined := joined_samples(loss))
    ]


def _name(loss: Any) -> str:
    return getattr(loss, "name", None) or getattr(loss, "__name__", None) or str(loss)


def _is_of_keras(loss: Any) -> bool:
    """Return whether Keras computes a loss; a user's own function may return a sum."""
    if isinstance(loss, keras.losses.Loss):
        function = getattr(loss, "fn", type(loss).call)
    else:
        function = keras.losses.get(loss)
    return getattr(function, "__module__", "").startswith("keras.")


@functools.cache
def check_computed_losses() -> None:
    """Make `compute_loss` check the losses of models with a distributed optimizer.

    It raises an error for regularizers, whose losses op=Sum would multiply, and warns
    once of losses of several samples, and of a `reduction` that the optimizer's `op`
    does not fit. The method of the class is replaced: an optimizer has no reference to
    its model.
    """
    compute_loss = keras.Model.compute_loss

    @do_not_convert
    @functools.wraps(compute_loss)
    def compute_checked(
        self: keras.Model,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        reductions = _reductions(self)
        if training and any(reduction.op == Sum for reduction in reductions):
            _check_regularizers(self)
        # Keras makes the losses of `compile` in its first call.
        loss = compute_loss(self, x, y, y_pred, sample_weight, training)
        if reductions and self._compile_loss is not None:
            losses = [(loss, w) for _, loss, w, _ in self._compile_loss._flat_losses]
            if training:
                _warn_of_mismatch(losses, reductions)
            if reductions[0].op == Sum:
                _log_sums(self, losses)
        return loss

    replace(keras.Model, "compute_loss", compute_checked, by=check_computed_losses)


def _reductions(model: keras.Model) -> list[Reduction]:
    """Return how the optimizers of a model combine the gradients of several ranks."""
    hooks = filter(None, map(get_hook, find_optimizers(model)))
    reductions = [hook.reducer.options.reduction for hook in hooks]
    return [each for each in reductions if needs_communication(each.process_set)]


def _warn_of_mismatch(
    losses: Sequence[WeightedLoss], reductions: Iterable[Reduction]
) -> None:
    for reduction in reductions:
        texts = [find_mismatch(losses, reduction), *find_batch_losses(losses)]
        if reduction.process_set.rank() == 0:
            for text in filter(None, texts):
                _warn(text)


def _log_sums(model: keras.Model, losses: Sequence[WeightedLoss]) -> None:
    # Keras logs the mean of the losses of batches. A loss that is a sum is a part of
    # the sum over all ranks, whose number of batches is that of one rank.
    sums = [loss.reduction == "sum" for loss, _ in losses]
    trackers = zip(model._compile_loss.metrics, sums, strict=False)
    for mean, is_sum in [(model._loss_tracker, all(sums)), *trackers]:
        if is_sum:
            set_aggregation(mean.count, "mean")


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _check_regularizers(model: keras.Model) -> None:
    if names := _regularized(model):
        raise ValueError(
            "op=hvd.Sum would multiply the losses of regularizers by the number of "
            f"ranks. Received: op=hvd.Sum, and regularizers in {', '.join(names[:3])}. "
            "Use op=hvd.Average, and multiply losses that are sums over samples by the "
            "number of ranks: model.compile(loss_weights=[float(hvd.size())], ...), a "
            "list with one weight for each output."
        )


def _regularized(model: keras.Model) -> list[str]:
    """Return paths of regularized weights, and names of layers with such outputs.

    Losses of `add_loss` may be sums over samples, which `Sum` combines correctly. Keras
    divides the loss of an `activity_regularizer` by the number of samples.
    """
    weights = [v for v in model.trainable_weights if getattr(v, "regularizer", None)]
    layers = [x for x in model._flatten_layers() if x.activity_regularizer is not None]
    return [weight.path for weight in weights] + [layer.name for layer in layers]
