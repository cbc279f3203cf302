"""The variables that a training step uses, and that Keras does not list."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.dtypes import as_tensorflow, is_internal
from hvdtrain.keras.consistency import unchecked
from hvdtrain.keras.metrics import metric_variables


class StepVariables:
    """Finds the variables of a training step that no list of Keras contains.

    Examples are the states of recurrent layers, variables of a loss, of a learning-rate
    schedule, of a `tf.Module` or of a closure, and a second optimizer. The graph of the
    step captures all of them. Their order is the order in which the step uses them.

    Args:
        batch: a batch of the training, whose shapes and dtypes a trace takes.
        are_stored: whether the training has checkpoints or commits.
    """

    def __init__(self, batch: Any, *, are_stored: bool) -> None:
        self.are_stored = are_stored
        self._spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
        self._graph: Any = None

    def note_graph(self) -> None:
        """Note the graph of a step; to be called while the step is traced."""
        if not tf.executing_eagerly():
            self._graph = tf.compat.v1.get_default_graph()

    def trace(self, model: keras.Model) -> None:
        """Trace a step, which is not run, unless one has been traced.

        Raises:
            Exception: what `train_step` raises in a graph, unless `run_eagerly` is set:
                then a warning is raised, and no variables are found.
        """

        @tf.autograph.experimental.do_not_convert
        def step(batch: Any) -> None:
            try:
                model.train_step(batch)
                self.note_graph()
            except Exception as error:
                if not model.run_eagerly:
                    raise
                _warn_of_eager(model, error)

        if self._graph is None:
            with unchecked():
                tf.function(step).get_concrete_function(self._spec)
            # As `fit_start.build` does.
            model._clear_losses()

    def unlisted(self, model: keras.Model) -> list[tf.Variable]:
        """Return the variables of the step that Keras does not list.

        They are known once a step has been traced, and none of a pipeline are.
        """
        if self._graph is None or hasattr(model, "full_variables"):
            return []
        listed = [
            *model.variables,
            *model.optimizer.variables,
            *metric_variables(model.metrics),
        ]
        known = {id(as_tensorflow(variable)) for variable in listed}
        unlisted = [v for v in self._used() if id(v) not in known]
        unlisted = [v for v in unlisted if not is_internal(v)]
        if self.are_stored:
            _warn_of_not_storable(v for v in unlisted if not _is_storable(v))
        return list(filter(_is_storable, unlisted))

    def _used(self) -> Iterator[tf.Variable]:
        by_handle = {
            id(variable.handle): variable for variable in self._graph.variables
        }
        for handle, _ in self._graph.captures:
            if id(handle) in by_handle:
                yield by_handle[id(handle)]


def _is_storable(variable: tf.Variable) -> bool:
    is_array = variable.dtype.is_numpy_compatible and variable.dtype != tf.string
    return is_array and variable.shape.is_fully_defined()


def _warn_of_not_storable(variables: Iterable[tf.Variable]) -> None:
    for variable in variables:
        warnings.warn(
            f"Checkpoints do not contain {variable.name} of dtype "
            f"{variable.dtype.name} and shape {variable.shape}, which the training "
            "step uses; expected numbers of a fixed shape.",
            stacklevel=3,
        )


def _warn_of_eager(model: keras.Model, error: Exception) -> None:
    warnings.warn(
        f"{type(model).__name__}.train_step runs eagerly and cannot be traced "
        f"({type(error).__name__}): checkpoints contain the variables that Keras "
        "lists, and no others that the step may use, such as variables of a loss.",
        stacklevel=2,
    )
