"""Real workloads that are trained by hvdtrain and by PyTorch: sizes and samples.

gpt2: GPT-2 (Radford et al. 2019) with its vocabulary of 50,257 tokens and tied
embeddings, cut to 6 layers of 384 columns and sequences of 128 tokens, with AdamW.

dlrm: the recommender of Naumov et al. 2019 with the layers of its published settings
for Criteo's Kaggle data: 13 dense features, 26 tables of 16 columns, the products of
all pairs of their rows, binary cross-entropy, and SGD. Here each table has 1,000,000
rows: 1.66 GB.

Importing this module loads neither TensorFlow nor PyTorch.
"""

import dataclasses
from typing import Any

import numpy as np

# Of a rank, read in turn.
BATCHES = 8
_EXPONENT = 1.05

# Inputs, an array or a tuple of arrays, and targets.
Samples = tuple[Any, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2:
    """The sizes of a GPT-2 without dropout, and the options of its AdamW."""

    vocabulary: int = 50_257
    layers: int = 6
    width: int = 384
    heads: int = 6
    length: int = 128
    batch_size: int = 4
    steps_per_execution: int = 1
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8

    def samples(self, count: int, *, seed: int) -> Samples:
        """Return int32 tokens of shape (count, length), and the next token of each."""
        random = np.random.RandomState(seed)
        tokens = zipf(random, self.vocabulary, (count, self.length + 1)).astype("int32")
        return tokens[:, :-1], tokens[:, 1:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dlrm:
    """The sizes of a DLRM, and the learning rate of its SGD.

    Attributes:
        rows: of each table.
        columns: of each table, and units of the last layer of the bottom.
        bottom: units of the layers of dense features, without the last.
        top: units of the layers of the products, without the last, which has one.
    """

    features: int = 13
    tables: int = 26
    rows: int = 1_000_000
    columns: int = 16
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)
    batch_size: int = 1024
    steps_per_execution: int = 10
    learning_rate: float = 0.1

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows and columns below the diagonal of the matrix of products."""
        return np.tril_indices(self.tables + 1, -1)

    def samples(self, count: int, *, seed: int) -> Samples:
        """Return the inputs and targets of so many samples.

        Inputs are float32 features of shape (count, features) and int32 ids of shape
        (count, tables); targets are float32 of shape (count, 1), 0 or 1. Frequent ids
        are spread over the rows of a table, in the same way for every seed.
        """
        random = np.random.RandomState(seed)
        order = np.random.RandomState(0).permutation(self.rows).astype("int32")
        features = random.uniform(size=(count, self.features)).astype("float32")
        ids = order[zipf(random, self.rows, (count, self.tables))]
        targets = random.randint(2, size=(count, 1)).astype("float32")
        return (features, ids), targets


LOADS: dict[str, Gpt2 | Dlrm] = {"gpt2": Gpt2(), "dlrm": Dlrm()}


def zipf(
    random: np.random.RandomState, size: int, shape: tuple[int, ...]
) -> np.ndarray:
    """Draw numbers below `size`: k with a probability proportional to (k + 1)^-1.05."""
    weights = np.cumsum(np.arange(1, size + 1, dtype="float64") ** -_EXPONENT)
    drawn = np.searchsorted(weights, weights[-1] * random.uniform(size=shape), "right")
    # Rounding may give 1.0 times the sum of the weights, which is past the last number.
    return np.minimum(drawn, size - 1)
