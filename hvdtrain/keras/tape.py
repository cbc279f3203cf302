"""A gradient tape whose gradients are combined over all ranks."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from hvdtrain.collectives.dtypes import Compression
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.process_sets import ProcessSet, global_process_set
from hvdtrain.collectives.transport import Average
from hvdtrain.keras.consistency import check_first_steps
from hvdtrain.keras.gradients import (
    Gradient,
    GradientOptions,
    GradientReducer,
    Groups,
    sum_duplicate_rows,
)
from hvdtrain.keras.variables import Variable, local_variables


@do_not_convert
def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> "DistributedTape":
    """Make a `tf.GradientTape` combine its gradients over all ranks.

    Signature and meaning follow `horovod.tensorflow.DistributedGradientTape`. Wrap
    the tape after its `with` block, or open the wrapped one with `with`. Other
    arguments are as in `DistributedOptimizer`.

    Args:
        op: `Average`, `Sum`, or `Adasum` (Maleki et al. 2020; under MPI only, and
            for a number of ranks that is a power of two).

    Raises:
        TypeError: if `gradtape` is not a `tf.GradientTape`.
        ValueError: for arguments out of range or excluding each other.
    """
    return DistributedTape(gradtape, GradientOptions.from_arguments(locals()))


_SourceAndGradient: TypeAlias = tuple[Variable | tf.Tensor, Gradient | None]


class DistributedTape:
    """A gradient tape that combines gradients over the ranks.

    Other methods are the methods of the tape itself: `watch`, `reset`,
    `stop_recording`, `watched_variables`; also `jacobian` and `batch_jacobian`, which
    are not reduced.
    """

    def __init__(self, tape: tf.GradientTape, options: GradientOptions) -> None:
        if not isinstance(tape, tf.GradientTape):
            raise TypeError(
                "DistributedGradientTape takes a tf.GradientTape. Received: "
                f"{tape!r} of type {type(tape).__name__}"
            )
        self._tape = tape
        self._reducer = GradientReducer("DistributedGradientTape", options)

    def __enter__(self) -> "DistributedTape":
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        return self._tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up special methods before __init__ has set the tape.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tape, name)

    def register_local_source(self, source: Variable | tf.Tensor) -> None:
        self._reducer.register_local(source)

    @do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return gradients in the structure of `sources`, combined over all ranks.

        A collective, with the arguments of `tf.GradientTape.gradient`: `target`,
        `sources` and `output_gradients` are nests of tensors or variables. The
        result is the same on every rank, but for local sources.

        Args:
            use_generic_names: Horovod's; names never depend on variables here.
        """
        gradients = self._tape.gradient(
            target, sources, output_gradients, unconnected_gradients
        )
        flat_sources = tf.nest.flatten(sources)
        self._reducer.check(flat_sources)
        variables = [
            source
            for source in flat_sources
            if isinstance(source, keras.Variable | tf.Variable)
            and not self._reducer.is_local(source)
        ]
        checked = check_first_steps(
            tf.nest.flatten(gradients), variables, process_set=self._reducer.process_set
        )
        reduced = self._reducer(checked, flat_sources)
        summed = sum_duplicate_rows(reduced, flat_sources)
        return tf.nest.pack_sequence_as(sources, summed)

    @do_not_convert
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Iterable[Variable | tf.Tensor],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[_SourceAndGradient], list[_SourceAndGradient]]:
        """Return local sources with their gradients, and the others with theirs."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        local: list[_SourceAndGradient] = []
        reduced: list[_SourceAndGradient] = []
        for source, gradient in zip(sources, gradients, strict=True):
            is_local = self._reducer.is_local(source)
            (local if is_local else reduced).append((source, gradient))
        return local, reduced


@do_not_convert
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> DistributedTape:
    """Make a `tf.GradientTape` combine the gradients of all but some layers.

    Other arguments are as in `DistributedGradientTape`.

    Args:
        local_layers: as in `PartialDistributedOptimizer`.
        scale_local_gradients: as in `PartialDistributedOptimizer`.
    """
    variables = local_variables(local_layers)
    options = GradientOptions.from_arguments(locals())
    distributed = DistributedTape(gradtape, options)
    for variable in variables:
        distributed.register_local_source(variable)
    return distributed
