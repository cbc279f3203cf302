"""Variables that are divided over the ranks of a process set."""

import dataclasses

import keras

from hvdtrain.collectives.dtypes import as_tensorflow

_ATTRIBUTE = "_hvdtrain_partition"
_STAGES = "_hvdtrain_stages"
# Optimizers whose update of an element depends on its whole variable.
NOT_ELEMENTWISE = (
    keras.optimizers.Adafactor,
    keras.optimizers.Lamb,
    keras.optimizers.Muon,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a dense variable is divided: each rank of a process set has a slice of it.

    The first ranks have one element more where the size is not divisible, as in
    `numpy.array_split` and in Horovod's reducescatter.

    Attributes:
        axis: the axis of the dense variable that is divided.
        size: elements of the dense variable on this axis.
        num_shards: number of shards: one for each rank of the process set.
        rank: number of the part that this rank has.
        process_set: the ranks.
        uneven: elements of each rank on this axis, where they are not about equal;
            0 for a rank that has none of the variable.
        shape: of the dense variable, where its flattened elements are divided: with
            the axis 0, and their number as size.
        within: the `Sharding` of the dense variable, where that is itself a slice of
            another one.
        sums_gradients: whether the gradient of a slice is the sum over these ranks'
            losses already, as that of a table which all of them look up in.
    """

    axis: int
    size: int
    num_shards: int
    rank: int
    process_set: object
    uneven: tuple | None = None
    shape: tuple | None = None
    within: "Sharding | None" = None
    sums_gradients: bool = False

    @property
    def sizes(self):
        """Elements of each rank on this axis."""
        if self.uneven is not None:
            return list(self.uneven)
        return even_sizes(self.size, self.num_shards)

    @property
    def local_slice(self):
        """This rank's part of the axis."""
        start = sum(self.sizes[: self.rank])
        return slice(start, start + self.sizes[self.rank])

    def shard(self, array):
        """Returns this rank's part of a dense array or tensor."""
        if self.within:
            array = self.within.shard(array)
        if self.shape is not None:
            return keras.ops.reshape(array, [-1])[self.local_slice]
        index = [slice(None)] * len(array.shape)
        index[self.axis] = self.local_slice
        return array[tuple(index)]

    def shard_shape(self, shape):
        """Returns the shape of this rank's part of a dense variable."""
        if self.within:
            shape = self.within.shard_shape(shape)
        if self.shape is not None:
            return (self.sizes[self.rank],)
        shape = list(shape)
        shape[self.axis] = self.sizes[self.rank]
        return tuple(shape)

    def full_shape(self, local_shape):
        """Returns the shape of the dense variable of which a part has this shape."""
        shape = self.shape
        if shape is None:
            shape = list(local_shape)
            shape[self.axis] = self.size
        return self.within.full_shape(shape) if self.within else tuple(shape)


def even_sizes(size, count):
    """Returns the sizes of `count` parts; the first ones may be larger by 1."""
    least, more = divmod(size, count)
    return [least + (number < more) for number in range(count)]


def set_sharding(variable: object, sharding: Sharding) -> None:
    """Notes that a variable is this rank's part of a dense one, unless it is all."""
    if sharding.num_shards == 1:
        return
    # Also on the TensorFlow variable of one of Keras: users pass either.
    for each in (variable, as_tensorflow(variable)):
        setattr(each, _ATTRIBUTE, sharding)


def get_sharding(variable):
    """Returns the `Sharding` of a Keras variable, None for one that is whole."""
    return getattr(variable, _ATTRIBUTE, None)


def set_stages(variable, process_set):
    """Notes that ranks of `process_set` train the other stages of a model."""
    setattr(variable, _STAGES, process_set)


def get_stages(variables):
    """Returns the ranks that train the stages of a model; None for one stage."""
    return next(
        (getattr(v, _STAGES) for v in variables if hasattr(v, _STAGES)),
        None,
    )


def assign_shard(variable, dense):
    """Assigns to a Keras variable its part of a dense value."""
    if sharding := get_sharding(variable):
        expected = sharding.full_shape(variable.shape)
        if tuple(dense.shape) != tuple(expected):
            raise ValueError(
                f"{variable.path} is a part of a variable of the shape "
                f"{tuple(expected)}. Received: values of the shape {tuple(dense.shape)}"
            )
        # An optimizer's slot may be all of a flattened variable.
        dense = keras.ops.reshape(sharding.shard(dense), variable.shape)
    variable.assign(dense)


def is_sharded(variables):
    """Returns whether this rank has only a slice of one of these variables."""
    return any(map(get_sharding, variables))


def has_summed_gradients(variables):
    """Returns whether the gradient of one of these is a sum over ranks already."""
    shardings = filter(None, map(get_sharding, variables))
    return any(each.sums_gradients for each in shardings)


def is_replicated(variable, process_set):
    """Returns whether no two ranks of a process set have different parts of it.

    Nor different variables in its place, those of the stages of a model.
    """
    stages, sharding = get_stages([variable]), get_sharding(variable)
    divided_over = [stages] if stages else []
    while sharding:
        divided_over.append(sharding.process_set)
        sharding = sharding.within
    ranks = {*process_set.ranks}
    return all(len(ranks & {*each.ranks}) <= 1 for each in divided_over)


def is_split_over_ranks(variables):
    """Returns whether other ranks train other parts of the same model."""
    return is_sharded(variables) or get_stages(variables) is not None


def check_elementwise(optimizer, variables):
    """Raises a ValueError if an update needs the whole of a divided variable."""
    if is_sharded(variables) and isinstance(optimizer, NOT_ELEMENTWISE):
        raise ValueError(
            f"{type(optimizer).__name__} computes the update of an element from its "
            "whole variable, of which each rank has a slice. Use an elementwise "
            "optimizer: SGD, Adam, AdamW, Nadam, RMSprop, Adagrad or Lion."
        )


def check_ranks(variables, reduced_over, axes=None):
    """Raises a ValueError if gradients of slices would be reduced as those of copies.

    A slice whose gradient is a sum over ranks is reduced over these; the ranks of a
    reduction have the same slice of any other variable.

    Args:
        variables: list of variables or tensors.
        reduced_over: the process set that gradients are reduced over.
        axes: list of the process sets along which variables may be divided; by default
            any.
    """
    data = list(reduced_over.ranks)
    along = None if axes is None else [list(axis.ranks) for axis in axes]
    for variable in variables:
        sharding = get_sharding(variable)
        if not sharding:
            continue
        ranks = list(sharding.process_set.ranks)
        if sharding.sums_gradients:
            is_right = ranks == data
        else:
            is_right = is_replicated(variable, reduced_over)
            is_right = is_right and (along is None or ranks in along)
        if not is_right:
            raise ValueError(
                f"{getattr(variable, 'path', variable.name)} is divided over the ranks "
                f"{ranks}; gradients are reduced over the ranks {data}. Pass the mesh "
                "of the layers: hvd.DistributedOptimizer(optimizer, mesh=mesh), or "
                "process_set=mesh.data.process_set to the tape."
            )
