"""The workloads of `benchmarks.loads` as PyTorch modules, the twins of the Keras ones.

Their layers are in the order of the Keras models' layers, from which `copy_weights`
copies.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.loads import Dlrm, Gpt2


class Gpt2Module(nn.Module):
    """GPT-2 of keras-hub: returns logits of tokens of shape (samples, length)."""

    def __init__(self, load: Gpt2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(load.vocabulary, load.width)
        self.positions = nn.Embedding(load.length, load.width)
        self.layers = nn.ModuleList(_Layer(load) for _ in range(load.layers))
        self.norm = nn.LayerNorm(load.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.01 if "tokens" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.tokens.weight)


class _QueryKeyValue(nn.Linear):
    """Three layers in one product, which is faster than three products."""


class _Layer(nn.Module):
    def __init__(self, load: Gpt2) -> None:
        super().__init__()
        width = load.width
        self.heads = load.heads
        self.attention_in = _QueryKeyValue(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        shape = (samples, length, 3, self.heads, width // self.heads)
        qkv = self.attention_in(self.attention_norm(x)).view(shape)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).reshape(x.shape))
        y = functional.gelu(self.wide(self.norm(x)), approximate="tanh")
        return x + self.narrow(y)


class DlrmModule(nn.Module):
    """DLRM: returns logits of shape (samples, 1)."""

    def __init__(self, load: Dlrm, *, sparse: bool) -> None:
        super().__init__()
        self.bottom = _dense((load.features, *load.bottom, load.columns))
        self.tables = nn.ModuleList(
            _table(load, sparse=sparse) for _ in range(load.tables)
        )
        rows, columns = load.pairs
        self.pairs = torch.tensor(rows), torch.tensor(columns)
        self.top = _dense((len(rows) + load.columns, *load.top))
        self.last = nn.Linear(load.top[-1], 1)

    def forward(self, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.bottom(features)
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([x, *rows], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows_of_pairs, columns = self.pairs
        pairs = products[:, rows_of_pairs, columns]
        return self.last(self.top(torch.cat([x, pairs], dim=1)))


def _table(load: Dlrm, *, sparse: bool) -> nn.Embedding:
    # Uninitialized memory first: the normal draw of nn.Embedding takes longer.
    weight = torch.empty(load.rows, load.columns).uniform_(-0.05, 0.05)
    return nn.Embedding.from_pretrained(weight, freeze=False, sparse=sparse)


def _dense(units: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(units):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def copy_weights(module: nn.Module, weights: Iterable[np.ndarray]) -> None:
    """Copy the weights of a Keras model into its twin."""
    remaining = iter(weights)
    for layer in module.modules():
        own = [each.data for each in layer.parameters(recurse=False)]
        if not isinstance(layer, nn.Linear):
            for parameter in own:
                parameter.copy_(torch.tensor(next(remaining)))
            continue
        count = 3 if isinstance(layer, _QueryKeyValue) else 1
        # A kernel and a bias for each.
        arrays = [next(remaining) for _ in range(2 * count)]
        kernels = [each.reshape(layer.in_features, -1) for each in arrays[::2]]
        biases = [each.ravel() for each in arrays[1::2]]
        own[0].copy_(torch.tensor(np.concatenate(kernels, axis=1).T))
        own[1].copy_(torch.tensor(np.concatenate(biases)))
    if next(remaining, None) is not None:
        raise ValueError("The Keras model has more weights than its twin.")
