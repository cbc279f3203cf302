"""Which optimizers, and which ranks of a reduction, sharded variables allow."""

from collections.abc import Iterable, Sequence

import keras
from horovod.tensorflow import ProcessSet

from hvdtrain.collectives.dtypes import local_shard
from hvdtrain.sharding.shards import get_sharding, is_replicated, is_sharded

# The update of an element depends on other elements of its variable: on a shard, these
# optimizers would compute other updates than on the full variable.
_NOT_ELEMENTWISE = (
    keras.optimizers.Adafactor,
    keras.optimizers.Lamb,
    keras.optimizers.Muon,
)


def check_elementwise(
    optimizer: keras.optimizers.Optimizer, variables: Iterable[keras.Variable]
) -> None:
    """Raise a ValueError for a sharded variable with an optimizer not elementwise."""
    if is_sharded(variables) and isinstance(optimizer, _NOT_ELEMENTWISE):
        raise ValueError(
            f"{type(optimizer).__name__} computes the update of an element from all "
            "elements of its variable, of which each rank has a shard. Use an "
            "elementwise optimizer: SGD, Adam, AdamW, Nadam, RMSprop, Adagrad or Lion."
        )


def check_takes_shards(
    optimizer: keras.optimizers.Optimizer, variables: Iterable[keras.Variable]
) -> None:
    """Raise a ValueError for fully sharded weights in place of their shards."""
    full = [v.path for v in variables if local_shard(v) is not v]
    if full:
        raise ValueError(
            f"The optimizer {optimizer.name!r} takes {full[0]} for a full weight, and "
            "the model is sharded. Make it by hvd.DistributedOptimizer, use it with a "
            "plain tf.GradientTape, and build it after the weights are sharded."
        )


def check_ranks(
    variables: Iterable[keras.Variable],
    reduced_over: ProcessSet,
    axes: Sequence[ProcessSet] | None = None,
) -> None:
    """Raise a ValueError if gradients of different shards would be reduced together.

    A shard whose gradient already is a sum over ranks must be reduced over exactly
    these ranks. All ranks of the reduction must hold the same shard of any other
    variable. Variables may be sharded along `axes` only, by default along any.
    """
    reducing_ranks = list(reduced_over.ranks)
    allowed = None if axes is None else [list(axis.ranks) for axis in axes]
    for variable in variables:
        sharding = get_sharding(variable)
        if not sharding:
            continue
        ranks = list(sharding.process_set.ranks)
        if sharding.sums_gradients:
            is_right = ranks == reducing_ranks
        else:
            is_right = is_replicated(variable, reduced_over)
            is_right = is_right and (allowed is None or ranks in allowed)
        if not is_right:
            raise ValueError(
                f"{getattr(variable, 'path', variable.name)} is sharded over the ranks "
                f"{ranks}; gradients are reduced over the ranks {reducing_ranks}. Pass "
                "the mesh of the layers: hvd.DistributedOptimizer(optimizer, "
                "mesh=mesh), or process_set=mesh.data.process_set to the tape."
            )
