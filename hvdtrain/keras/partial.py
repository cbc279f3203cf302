"""Layers whose gradients stay on their rank."""

import keras

from hvdtrain.collectives.dtypes import Compression
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.collectives.transport import Average
from hvdtrain.keras.gradients import GradientOptions, groups_argument
from hvdtrain.keras.optimizer import distribute
from hvdtrain.keras.tape import DistributedTape


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer,
    name=None,
    device_dense="",
    device_sparse="",
    compression=Compression.none,
    sparse_as_dense=False,
    gradient_predivide_factor=1.0,
    op=Average,
    groups=None,
    process_set=global_process_set,
    local_layers=None,
    scale_local_gradients=True,
):
    """A `DistributedOptimizer` that leaves the gradients of some layers as they are.

    Args:
        optimizer: as in `DistributedOptimizer`, like all that is not listed here.
        name: see there.
        device_dense: see there.
        device_sparse: see there.
        compression: see there.
        sparse_as_dense: see there.
        gradient_predivide_factor: see there.
        op: see there.
        groups: see there.
        process_set: see there.
        local_layers: a built `keras.layers.Layer`, or a collection of them, that
            each rank trains on its own batch alone.
        scale_local_gradients: divide their gradients by the number of ranks, as
            Horovod does, so that they weigh as much as averaged ones.

    Raises:
        ValueError: for a local layer that is no Keras layer or has not been built.
    """
    variables = _variables(local_layers)
    options = GradientOptions(
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    distributed = distribute(optimizer, options, name=name)
    for variable in variables:
        distributed.register_local_var(variable)
    return distributed


@do_not_convert
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape,
    device_dense="",
    device_sparse="",
    compression=Compression.none,
    sparse_as_dense=False,
    op=Average,
    gradient_predivide_factor=1.0,
    num_groups=0,
    groups=None,
    process_set=global_process_set,
    local_layers=None,
    scale_local_gradients=True,
):
    """A `DistributedGradientTape` that leaves some layers' gradients as they are.

    Args:
        gradtape: as in `DistributedGradientTape`, like all that is not listed here.
        device_dense: see there.
        device_sparse: see there.
        compression: see there.
        sparse_as_dense: see there.
        op: see there.
        gradient_predivide_factor: see there.
        num_groups: see there.
        groups: see there.
        process_set: see there.
        local_layers: as in `PartialDistributedOptimizer`.
        scale_local_gradients: as in `PartialDistributedOptimizer`.
    """
    variables = _variables(local_layers)
    options = GradientOptions(
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_argument(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    distributed = DistributedTape(gradtape, options)
    for variable in variables:
        distributed.register_local_source(variable)
    return distributed


def _variables(layers):
    if layers is None:
        return []
    layers = [layers] if isinstance(layers, keras.layers.Layer) else list(layers)
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                "local_layers must be of type keras.layers.Layer. Received: "
                f"{layer!r} of type {type(layer).__name__}"
            )
        if not layer.built:
            raise ValueError(
                f"The local layer {layer.name} has not been built: its variables, "
                "which are to stay local, do not exist yet. Build the model first, "
                "with keras.Input or model.build(input_shape)."
            )
    return [variable for layer in layers for variable in layer.trainable_weights]
