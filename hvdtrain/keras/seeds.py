"""The seeds of random layers, which ranks must not share.

The state of a `keras.random.SeedGenerator` is a variable of the layer: its seed, and a
counter of draws. Ranks that hold equal states drop the same units. Functions of
`keras.random` that get no seed draw from one generator of Keras, which no model has.
"""

import random
from collections.abc import Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras.src.random import seed_generator

from hvdtrain.collectives import ops
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    global_process_set,
    needs_communication,
)

# Keras' name of the variable.
_STATE = "seed_generator_state"


def is_seed_state(variable: keras.Variable | tf.Variable) -> bool:
    """Return whether this is the state of a `SeedGenerator`."""
    # The name of a TensorFlow variable has its scope and a number around Keras' name.
    return variable.name.rpartition("/")[2].partition(":")[0] == _STATE


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """Return the states of the `SeedGenerator`s in the layers of `model`."""
    return [variable for variable in model.variables if is_seed_state(variable)]


def global_seed_state() -> keras.Variable:
    """Return the state of the generator of `keras.random`, for calls without a seed."""
    # Keras draws its seed from this generator, which may also shuffle samples.
    before = random.getstate()
    try:
        return seed_generator.global_seed_generator().state
    finally:
        random.setstate(before)


def separate_seeds(
    states: Iterable[keras.Variable | tf.Variable],
    process_set: ProcessSet = global_process_set,
) -> None:
    """Make the seeds of random layers different on ranks that have equal ones.

    The seed of `keras.random` is made different as well.

    Ranks that are seeded alike (`keras.utils.set_random_seed(1)` everywhere) would
    drop the same units for all of the global batch. All ranks' seeds are gathered; a
    rank whose seed occurs on a lower rank takes a new one that is a function of
    (seed, rank). The counter of a seed stays.

    Seeds that differ already stay, so repeating the call has no effect: a run that was
    resumed with each rank's seeds does not change, and in one that was resumed with
    rank 0's, all ranks take the seeds that they had.

    Args:
        states: what `seed_states` returns, in the same order on every rank.
        process_set: the ranks that draw different numbers.
    """
    if needs_communication(process_set):
        # Now, also where a graph is being traced.
        with tf.init_scope():
            _separate([*states, global_seed_state()], process_set)


def _separate(
    states: Sequence[keras.Variable | tf.Variable], process_set: ProcessSet
) -> None:
    seeds = np.array([[int(state.numpy()[0]) for state in states]], "int64")
    seeds_by_rank = ops.allgather(seeds, "SeedStates", process_set=process_set).numpy()
    rank = process_set.rank()
    for i, state in enumerate(states):
        seed = seeds_by_rank[rank, i]
        if seed in seeds_by_rank[:rank, i]:
            entropy = np.random.SeedSequence([abs(int(seed)), rank])
            # 31 bits: the state is a signed integer on some devices.
            new_seed = int(entropy.generate_state(1)[0] >> 1)
            state.assign([new_seed, int(state.numpy()[1])])
