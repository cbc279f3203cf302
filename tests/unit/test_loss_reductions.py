"""Which losses fit which `op`: the table of `loss_reductions`."""

from types import SimpleNamespace

import keras
import pytest

import hvdtrain.keras as hvd
from hvdtrain.collectives.transport import Reduction
from hvdtrain.keras.loss_reductions import find_batch_losses, find_mismatch

TWO_RANKS = SimpleNamespace(size=lambda: 2)
NEEDS_MEAN = (
    "expected a mean over samples: with op=hvd.Average the gradient of a sum is"
)
NEEDS_SUM = "expected a sum over samples: with op=hvd.Sum the gradient"


def of_a_user(y_true, y_pred):
    """May return a sum."""


def mse(reduction):
    return keras.losses.MeanSquaredError(reduction=reduction)


@pytest.mark.parametrize(
    ("loss", "weight", "op", "expected"),
    [
        ("mse", None, hvd.Average, ""),
        (mse("sum_over_batch_size"), None, hvd.Average, ""),
        (mse("sum"), None, hvd.Average, NEEDS_MEAN),
        (mse("none"), None, hvd.Average, NEEDS_MEAN),
        (mse(None), None, hvd.Average, NEEDS_MEAN),
        # The number of ranks makes up for the mean over them.
        (mse("sum"), 2.0, hvd.Average, ""),
        # An output that is not trained.
        (mse("sum"), 0.0, hvd.Average, ""),
        (mse("sum"), None, hvd.Sum, ""),
        (mse(None), None, hvd.Sum, ""),
        ("mse", None, hvd.Sum, NEEDS_SUM),
        (mse("mean"), None, hvd.Sum, NEEDS_SUM),
        (mse("mean"), 0.5, hvd.Sum, ""),
        (mse("mean"), 0.0, hvd.Sum, ""),
        (of_a_user, None, hvd.Sum, ""),
        (mse("mean_with_sample_weight"), None, hvd.Average, "its own sum of weights"),
    ],
)
def test_the_loss_that_op_does_not_fit(loss, weight, op, expected):
    reduction = Reduction(op=op, process_set=TWO_RANKS)
    text = find_mismatch([("mse", 0.0), (loss, weight)], reduction)
    assert expected in text
    assert bool(text) == bool(expected)


class GatheredDice(keras.losses.Dice):
    """As the warning advises, of the samples of all ranks."""

    def call(self, y_true, y_pred):
        return super().call(hvd.allgather(y_true), hvd.allgather(y_pred))


@pytest.mark.parametrize(
    ("loss", "weight", "expected"),
    [
        (keras.losses.Dice(), None, "The loss dice is computed of the samples"),
        (keras.losses.Dice(axis=(1, 2, 3)), None, ""),
        (GatheredDice(), None, ""),
        (keras.losses.Tversky(axis=(0, 1)), 1.0, "(axis=(0, 1))"),
        (keras.losses.Tversky(), 0.0, ""),
        (keras.losses.Circle(), 2.0, "(their pairs)"),
        (keras.losses.CosineSimilarity(axis=0), None, "(axis=0)"),
        (keras.losses.CosineSimilarity(), None, ""),
        (keras.losses.get("mse"), None, ""),
    ],
)
def test_losses_of_several_samples(loss, weight, expected):
    text = "".join(find_batch_losses([("mse", None), (loss, weight)]))
    assert expected in text
    assert bool(text) == bool(expected)
