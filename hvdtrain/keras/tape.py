"""A gradient tape whose gradients are combined over all ranks."""

import keras
import tensorflow as tf

from hvdtrain.collectives.dtypes import Compression
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.collectives.transport import Average
from hvdtrain.keras.consistency import check_first_steps
from hvdtrain.keras.gradients import (
    GradientOptions,
    GradientReducer,
    add_up_rows,
    groups_argument,
)
from hvdtrain.keras.variables import local_variables


@do_not_convert
def DistributedGradientTape(  # noqa: N802 - Horovod's name
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
    scale_local_gradients=True,
):
    """Makes the gradients of a `tf.GradientTape` those of the job.

    Signature and meaning follow `horovod.tensorflow.DistributedGradientTape`. Wrap
    the tape after its `with` block, or open the wrapped one with `with`.

    Args:
        gradtape: a `tf.GradientTape`.
        device_dense: device of the reduction of dense gradients; "" is the default.
        device_sparse: the same for `tf.IndexedSlices`.
        compression: `Compression.none`, `Compression.fp16` or `Compression.bf16`.
        sparse_as_dense: reduce `tf.IndexedSlices` as dense tensors.
        op: `Average`, `Sum`, or `Adasum` (Maleki et al. 2020; under MPI only, and
            for a number of ranks that is a power of two).
        gradient_predivide_factor: with Average, divide by it before the sum and
            multiply after it.
        num_groups: Horovod's deprecated name of `groups`.
        groups: number of groups, or list of lists of variables, that are reduced
            together. By default gradients are grouped by size, some 16 MB each.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients of local sources by the number of
            ranks.

    Returns:
        An object with the methods of `gradtape` and those of `DistributedTape`.

    Raises:
        TypeError: if `gradtape` is not a `tf.GradientTape`.
        ValueError: for arguments out of range or excluding each other.
    """
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
    return DistributedTape(gradtape, options)


class DistributedTape:
    """What `DistributedGradientTape` returns: a tape, and the ranks' gradients.

    Everything that is not defined here is the tape's own: `watch`, `reset`,
    `stop_recording`, `watched_variables`; `jacobian` and `batch_jacobian`, which
    stay this rank's.

    Args:
        tape: a `tf.GradientTape`.
        options: `GradientOptions`.

    Raises:
        TypeError: if `tape` is not a `tf.GradientTape`.
    """

    def __init__(self, tape, options):
        if not isinstance(tape, tf.GradientTape):
            raise TypeError(
                "DistributedGradientTape takes a tf.GradientTape. Received: "
                f"{tape!r} of type {type(tape).__name__}"
            )
        self._tape = tape
        self._reducer = GradientReducer("DistributedGradientTape", options)

    def __enter__(self):
        """Starts recording."""
        self._tape.__enter__()
        return self

    def __exit__(self, *exception):
        """Stops recording."""
        return self._tape.__exit__(*exception)

    def __getattr__(self, name):
        """Everything else is the tape's own."""
        # copy and pickle look up special methods before __init__ has set the tape.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tape, name)

    def register_local_source(self, source):
        """Leaves the gradient of `source`, a variable or tensor, to this rank."""
        self._reducer.register_local(source)

    @do_not_convert
    def gradient(
        self,
        target,
        sources,
        output_gradients=None,
        use_generic_names=False,
        unconnected_gradients=tf.UnconnectedGradients.NONE,
    ):
        """As `tf.GradientTape.gradient`, combined over all ranks.

        Args:
            target: the tensor, or nest of tensors, to differentiate.
            sources: a variable or tensor, or a nest of them.
            output_gradients: gradients of `target`, of its structure.
            use_generic_names: Horovod's; names never depend on variables here.
            unconnected_gradients: as in `tf.GradientTape.gradient`.

        Returns:
            Gradients in the structure of `sources`, the same on every rank, but
            for local sources.
        """
        gradients = self._tape.gradient(
            target, sources, output_gradients, unconnected_gradients
        )
        flat_sources = tf.nest.flatten(sources)
        self._reducer.check(flat_sources)
        checked = check_first_steps(
            tf.nest.flatten(gradients),
            [s for s in flat_sources if self._is_shared_variable(s)],
            process_set=self._reducer.process_set,
        )
        reduced = add_up_rows(self._reducer(checked, flat_sources), flat_sources)
        return tf.nest.pack_sequence_as(sources, reduced)

    def _is_shared_variable(self, source):
        is_variable = isinstance(source, keras.Variable | tf.Variable)
        return is_variable and not self._reducer.is_local(source)

    @do_not_convert
    def get_local_and_global_gradients(
        self, target, sources, output_gradients=None, use_generic_names=False
    ):
        """Returns two lists of (source, gradient): of local sources, and the rest."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        local, shared = [], []
        for source, gradient in zip(sources, gradients, strict=True):
            is_local = self._reducer.is_local(source)
            (local if is_local else shared).append((source, gradient))
        return local, shared


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
    variables = local_variables(local_layers)
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
