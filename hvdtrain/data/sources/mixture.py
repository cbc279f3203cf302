"""A mixture of sources: each has an exact share of the samples that are read."""

import dataclasses
import fractions
import functools
import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.formats import DataError
from hvdtrain.data.index_shuffle import index_shuffle
from hvdtrain.data.sampler import Sampler
from hvdtrain.data.sources.parsing import parse
from hvdtrain.data.sources.source import Source, all_locks, as_source

# Positions within a block are shuffled: with a regular pattern, such as 1, 2, 1, 2, the
# even ranks would read one source and the odd ranks the other.
_BLOCK = 1024


def mix(sources: Iterable[tuple[Any, float]]) -> Source:
    """Return a source that reads from several sources, in proportion to weights.

    The share of each source is exact: after any multiple of 1,024 samples it is off by
    less than two samples (for up to 30 sources). Positions in between are shuffled.
    Each source is read in epochs of its own: all of its samples once, in its own order,
    then all of them again, whatever the weights.

    An epoch of `training.fit` takes as many samples as the sources have together.
    With weights that are not in proportion to the lengths, it reads some sources more
    than once and others in part. `data.one_pass` reads each sample of each source once.

    Args:
        sources: pairs of a source, as for `data.batches`, and a positive weight.
            Weights need not add up to 1. 0.1 counts as one tenth, exactly.

    Raises:
        DataError: a weight is not a positive number, or the samples of the sources
            differ in structure, type or shape.
    """
    pairs = list(sources)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise DataError(
            f"Received {pairs!r:.80} to mix; expected pairs of a source and a weight."
        )
    children = [as_source(source) for source, _ in pairs]
    return MixedSource(children, _integers([weight for _, weight in pairs]))


class MixedSource(Source):
    """Sources, and how often each is read. See `mix`.

    Sample numbers count through the sources, one source after the other.
    """

    has_order = True

    def __init__(self, children: list[Source], weights: tuple[int, ...]) -> None:
        self._children = children
        self._weights = weights
        self._starts = np.cumsum([0, *map(len, children)])
        self.locks = all_locks(children)
        self.is_remote = any(child.is_remote for child in children)
        self.is_grouped = any(child.is_grouped for child in children)
        first, *others = children
        for number, child in enumerate(others, 1):
            if child.decode != first.decode:
                raise DataError(
                    f"Received sources 0 and {number} of a mixture with different "
                    "`decode`; expected the same function for all."
                )
        self.decode = first.decode
        # AutoGraph would replace a `DataError` by an error of its own.
        self.parse = tf.autograph.experimental.do_not_convert(self._parse)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: np.ndarray) -> Any:
        """Return what each source reads, and where each sample is in all of these."""
        owners = np.searchsorted(self._starts, indices, side="right") - 1
        places = np.empty_like(indices)
        parts, start = [], 0
        pairs = zip(self._children, self._examples, strict=True)
        for number, (child, example) in enumerate(pairs):
            mask = owners == number
            own = indices[mask] - self._starts[number]
            # A batch has the structure of all others. A sample that stays unused, since
            # a `parse` may fail for no samples.
            parts.append(child.read(own) if own.size else example)
            places[mask] = start + np.arange(own.size)
            start += max(1, own.size)
        return tuple(parts), places

    def shuffle(self, sampler: Sampler, positions: np.ndarray) -> np.ndarray:
        owners, counts = self._deal(sampler.seed, positions)
        numbers = np.empty_like(positions)
        for number, child in enumerate(self._children):
            mask = owners == number
            if mask.any():
                own = _sampler(sampler, child, number)
                numbers[mask] = child.shuffle(own, counts[mask]) + self._starts[number]
        return numbers

    def sort(self, indices: np.ndarray) -> np.ndarray:
        # Each rank gets an equal share of each source: contiguous shares of all sample
        # numbers would give one rank the samples of one source.
        owners = np.searchsorted(self._starts, indices, side="right") - 1
        shares = np.empty(len(indices))
        for number, child in enumerate(self._children):
            [places] = np.nonzero(owners == number)
            order = np.arange(len(places))
            if child.is_grouped:
                order = child.sort(indices[places] - self._starts[number])
            shares[places[order]] = (np.arange(len(places)) + 0.5) / len(places)
        return np.argsort(shares, kind="stable")

    def fingerprint(self) -> Any:
        prints = [child.fingerprint() for child in self._children]
        return {"mix": prints, "weights": list(self._weights)}

    def _deal(self, seed: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position, and its count of earlier positions."""
        owners, counts = np.empty_like(positions), np.empty_like(positions)
        blocks, offsets = np.divmod(positions, _BLOCK)
        for block in np.unique(blocks):
            mask = blocks == block
            dealt = _deal_block(self._weights, seed, int(block))
            owners[mask], counts[mask] = (values[offsets[mask]] for values in dealt)
        return owners, counts

    def _parse(self, raw: Any) -> Any:
        parts, places = raw
        parsed = [
            # The last array of a mixture's raw samples has one number for each.
            parse(child, part, tf.shape(tf.nest.flatten(part)[-1])[0])
            if child.parse
            else part
            for child, part in zip(self._children, parts, strict=True)
        ]
        columns = zip(*map(tf.nest.flatten, parsed), strict=True)
        merged = [tf.gather(tf.concat(column, axis=0), places) for column in columns]
        return tf.nest.pack_sequence_as(parsed[0], merged)

    @functools.cached_property
    def _examples(self) -> list[Any]:
        """One sample of each source; checks that all sources fit."""
        examples = [child.read(np.zeros(1, np.int64)) for child in self._children]
        specs = [
            _parsed_spec(child, example)
            for child, example in zip(self._children, examples, strict=True)
        ]
        for number, spec in enumerate(specs):
            if not _is_static(spec):
                raise DataError(
                    f"Received samples of unknown shape from source {number} of a "
                    "mixture; expected static shapes: let parse return "
                    "ragged.to_tensor(shape=(None, 128)), or use tf.ensure_shape."
                )
            if not _fits(spec, specs[0]):
                raise DataError(
                    f"Received samples {_text(specs[0])} of source 0 and "
                    f"{_text(spec)} of source {number} of a mixture; expected the same "
                    "structure, types and shapes: give a source another `parse`."
                )
        return examples


@functools.lru_cache(maxsize=8)
def _deal_block(
    weights: tuple[int, ...], seed: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return sources and counts, as `MixedSource._deal`, for the positions of a block.

    A pure function in constant memory: the counts at the start of a block are computed
    from its number.
    """
    starts = _counts(weights, block * _BLOCK)
    ends = _counts(weights, (block + 1) * _BLOCK)
    shares = [end - start for start, end in zip(starts, ends, strict=True)]
    order = index_shuffle(np.arange(_BLOCK), num_samples=_BLOCK, seed=seed, epoch=block)
    owners = np.repeat(np.arange(len(weights)), shares)[order]
    counts = np.empty_like(owners)
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        counts[owners == number] = np.arange(start, end)
    return owners, counts


def _counts(weights: tuple[int, ...], positions: int) -> list[int]:
    """Return how many of the first `positions` are of each source.

    The heaviest source takes its share of the positions, rounded; the next one takes
    its share of the rest, and so on. No count decreases from one position to the next,
    and the errors of K sources are at most (1 + 1/2 + ... + 1/K) / 2. Python's
    integers do not overflow.
    """
    counts = [0] * len(weights)
    rest, total = positions, sum(weights)
    for number in sorted(range(len(weights)), key=lambda k: -weights[k]):
        # Rounded to the nearest integer; a half is rounded up.
        counts[number] = (2 * rest * weights[number] + total) // (2 * total)
        rest -= counts[number]
        total -= weights[number]
    return counts


def _integers(weights: list[float]) -> tuple[int, ...]:
    """Return the smallest integers in the proportion of weights."""
    if not weights:
        raise DataError("Received no sources to mix; expected one or more.")
    try:
        # By the shortest decimals that give the float: 0.1 is 1/10.
        exact = [fractions.Fraction(str(weight)) for weight in weights]
    except ValueError:
        exact = []
    if not exact or min(exact) <= 0:
        raise DataError(f"Received the weights {weights}; expected positive numbers.")
    scale = math.lcm(*(value.denominator for value in exact))
    integers = [int(value * scale) for value in exact]
    divisor = math.gcd(*integers)
    return tuple(value // divisor for value in integers)


def _sampler(sampler: Sampler, child: Source, number: int) -> Sampler:
    """Return the sampler by which one source of a mixture is shuffled."""
    name = f"{sampler.seed} {number}".encode()
    return dataclasses.replace(
        sampler,
        num_samples=len(child),
        # Two sources of one length have different orders.
        seed=int.from_bytes(hashlib.sha256(name).digest()[:4], "little"),
        # A source may have fewer samples than there are ranks.
        rank=0,
        size=1,
    )


def _parsed_spec(child: Source, example: Any) -> Any:
    """Return the nest of `tf.TensorSpec` of parsed samples, as tf.data traces it."""

    def spec(array: np.ndarray) -> tf.TensorSpec:
        return tf.TensorSpec((None, *array.shape[1:]), tf.as_dtype(array.dtype))

    specs = tf.nest.map_structure(spec, example)
    if not child.parse:
        return specs
    traced = tf.function(child.parse).get_concrete_function(specs)
    return traced.structured_outputs


def _is_static(spec: Any) -> bool:
    shapes = [leaf.shape for leaf in tf.nest.flatten(spec)]
    return all(shape.rank and shape[1:].is_fully_defined() for shape in shapes)


def _fits(spec: Any, other: Any) -> bool:
    try:
        tf.nest.assert_same_structure(spec, other)
    except (TypeError, ValueError):
        return False
    pairs = zip(tf.nest.flatten(spec), tf.nest.flatten(other), strict=True)
    return all(
        a.dtype == b.dtype and a.shape.as_list()[1:] == b.shape.as_list()[1:]
        for a, b in pairs
    )


def _text(spec: Any) -> str:
    """Return a nest of specs as short text, such as {'x': float32 (3,)}."""

    def text(leaf: tf.TensorSpec) -> str:
        return f"{leaf.dtype.name} {tuple(leaf.shape.as_list()[1:])}"

    return str(tf.nest.map_structure(text, spec))
