"""Random numbers of steps: recorded on each rank, then given to one process.

A layer that draws numbers for each sample, as in a variational autoencoder, draws other
numbers for a batch of another size. In the phase "ranks" the numbers are written to
files; later phases take the numbers of all ranks, in the order of the ranks, where a
draw has as many rows as theirs together.

A draw is known by its `keras.random.SeedGenerator` and by the place of the draw in the
sequence of this generator, which counts in the second number of its state. Functions
whose arguments are tensors are left out: gradients go through them.
"""

import functools
import numbers
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.keras.seams import replace
from hvdtrain.keras.seeds import global_seed_state
from hvdtrain.verify.trajectory import Directory
from hvdtrain.verify.variable_names import VariableNames

_FUNCTIONS = ("normal", "truncated_normal", "uniform", "randint")


class Draws:
    """The generators whose draws were, and were not, those of the ranks, by name."""

    def __init__(self) -> None:
        self.matched: set[str] = set()
        self.unmatched: set[str] = set()


class Noise:
    """The draws of one phase.

    Args:
        files: the files of the phase "ranks".
        draws: notes which generators could be given the numbers of the ranks.
        size: the number of ranks whose draws are read; 0 in this phase, which writes.
    """

    def __init__(
        self,
        files: Directory,
        names: VariableNames,
        draws: Draws,
        *,
        rank: int,
        size: int,
    ) -> None:
        self._files = files
        self._names = names
        self._rank = rank
        self._ranks = range(size)
        self._draws = draws

    def exchange(self, state: Any, place: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Return the values of a draw, or those of all ranks in place of them."""
        (name,) = self._names.by_name([state])
        exchange = self._read if self._ranks else self._write
        result = tf.numpy_function(
            functools.partial(exchange, name), [place, values], values.dtype
        )
        result.set_shape(values.shape)
        return result

    def _write(self, name: str, place: np.ndarray, values: np.ndarray) -> np.ndarray:
        self._files.write("draw", self._rank, _key(name), int(place), value=values)
        return values

    def _read(self, name: str, place: np.ndarray, values: np.ndarray) -> np.ndarray:
        drawn = [
            self._files.read("draw", rank, _key(name), int(place))
            for rank in self._ranks
        ]
        shape = (sum(len(x) for x in drawn if np.ndim(x)), *values.shape[1:])
        is_known = all(np.ndim(x) and x.shape[1:] == shape[1:] for x in drawn)
        is_matched = is_known and shape == values.shape
        noted = self._draws
        (noted.matched if is_matched else noted.unmatched).add(name)
        return np.concatenate(drawn).astype(values.dtype) if is_matched else values


def _key(name: str) -> int:
    return zlib.crc32(name.encode())


def exchange_noise(noise: Noise) -> None:
    """Make the random functions of Keras exchange what they draw."""
    for name in _FUNCTIONS:
        draw = getattr(keras.src.backend.random, name)
        replace(
            keras.src.backend.random, name, _exchanged(draw, noise), by=exchange_noise
        )


def _exchanged(draw: Callable[..., tf.Tensor], noise: Noise) -> Callable[..., Any]:
    @do_not_convert
    @functools.wraps(draw)
    def draw_and_exchange(
        shape: Any, *args: Any, dtype: Any = None, seed: Any = None, **kwargs: Any
    ) -> Any:
        options = {"seed": seed} if dtype is None else {"seed": seed, "dtype": dtype}
        are_numbers = all(
            isinstance(each, numbers.Number) for each in (*args, *kwargs.values())
        )
        # A number as the seed is that of an initializer.
        if isinstance(seed, int) or not are_numbers:
            return draw(shape, *args, **options, **kwargs)
        state = global_seed_state() if seed is None else seed.state
        # Not the value after the draw.
        place = tf.identity(keras.ops.convert_to_tensor(state)[1] * 1)
        return noise.exchange(state, place, draw(shape, *args, **options, **kwargs))

    return draw_and_exchange
