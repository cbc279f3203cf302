"""Records the state of a training after each step."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.keras import metrics
from hvdtrain.keras.variables import Optimizer
from hvdtrain.sharding.shards import is_split_over_ranks
from hvdtrain.verification.trajectory import Directory, Facts, State, digest

# What reductions of gradients were traced: operation and compression.
Reductions = list[tuple[str, str]]


class FinishedError(BaseException):
    """Ends the script after the last step; `except Exception` does not catch it."""


class StepRecorder:
    """Writes the state of a training after each step.

    Args:
        files: of this phase.
        rank: of this process.
        steps: number of steps after which the script ends.
        on_steps: called after steps, with the number of those since the last call.
        compared: in the reference, the files and the number of ranks of the phase whose
            metrics are combined.
    """

    def __init__(
        self,
        files: Directory,
        *,
        rank: int,
        steps: int,
        on_steps: Callable[[int], None],
        compared: tuple[Directory, int] | None = None,
    ) -> None:
        self._files = files
        self._rank = rank
        self._steps = steps
        self._on_steps = on_steps
        self._compared = compared
        self._optimizers: list[Optimizer] = []
        self._models: list[keras.Model] = []
        self._done = 0
        self.reductions: Reductions = []
        self.has_dense_rows = False

    def add(self, optimizer: Optimizer) -> None:
        """Follow the steps of an optimizer that has been built."""
        if any(optimizer is known for known in self._optimizers):
            return
        number = len(self._optimizers)
        self._optimizers.append(optimizer)
        weights = _named(optimizer._trainable_variables)
        with tf.init_scope():
            if self._compared:
                self._take_start(weights, number)
            start = self._values(weights)
        self._files.write("start", self._rank, number, value=start)

    def _take_start(self, weights: Mapping[str, keras.Variable], number: int) -> None:
        """Assign the weights with which rank 0 has started in the first phase."""
        recorded, _ = self._compared or (None, 0)
        values = recorded.read("start", 0, number) if recorded else None
        for name, value in (values or {}).items():
            if name in weights:
                weights[name].assign(value)

    def record(self) -> None:
        """Write the state if there was a step since the last call.

        Raises:
            FinishedError: it was the last step.
        """
        counts = [int(optimizer._iterations) for optimizer in self._optimizers]
        step = max(counts, default=0)
        if step <= self._done:
            return
        if not self._done:
            self._models = _existing(keras.Model)
            self._check_replicated()
            self._files.write("facts", self._rank, value=self._facts())
        self._on_steps(step - self._done)
        self._done = step
        self._files.write("state", self._rank, step, value=self._state(step))
        if step >= self._steps:
            raise FinishedError

    def _check_replicated(self) -> None:
        weights = [v for model in self._models for v in model.weights]
        if is_split_over_ranks(weights):
            raise ValueError(
                "Received a model that is sharded over ranks; expected one that each "
                "rank has as a whole: a verification cannot put it into one process."
            )

    def _state(self, step: int) -> State:
        variables = [v for model in self._models for v in model.weights]
        for optimizer in self._optimizers:
            variables += [*optimizer._trainable_variables, *optimizer.variables]
        measured = [metric for model in self._models for metric in model.metrics]
        states = metrics.local_states(metrics.metric_variables(measured))
        return State(
            variables=self._values(_named(variables)),
            learning_rates={
                each.name: float(each.learning_rate) for each in self._optimizers
            },
            draws=dict(_draws(self._models)),
            metric_states=states,
            metrics=_comparable(metrics.results(measured, states)),
            metrics_of_ranks=self._metrics_of_ranks(measured, step),
        )

    def _metrics_of_ranks(
        self, measured: Sequence[keras.Metric], step: int
    ) -> dict[str, Any] | None:
        if not self._compared:
            return None
        files, size = self._compared
        states = [files.read("state", rank, step) for rank in range(size)]
        if None in states:
            return None
        by_variable = zip(*(state.metric_states for state in states), strict=True)
        variables = metrics.metric_variables(measured)
        combined = [
            _combined(variable.aggregation, values)
            for variable, values in zip(variables, by_variable, strict=True)
        ]
        return _comparable(metrics.results(measured, combined))

    def _values(self, variables: dict[str, Any]) -> dict[str, Any]:
        values = {
            name: np.array(keras.ops.convert_to_numpy(variable))
            for name, variable in variables.items()
        }
        return values if self._rank == 0 else {n: digest(v) for n, v in values.items()}

    def _facts(self) -> Facts:
        layers = [layer for model in self._models for layer in model._flatten_layers()]
        return Facts(
            reductions=self.reductions,
            has_dense_rows=self.has_dense_rows,
            loss_reductions=[
                str(loss.reduction) for loss in _existing(keras.losses.Loss)
            ],
            local_normalizations=_names(
                layer for layer in layers if _normalizes_locally(layer)
            ),
            masking_layers=_names(
                layer
                for layer in layers
                if isinstance(layer, keras.layers.Masking)
                or getattr(layer, "mask_zero", False)
            ),
        )


def _comparable(results: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that are equal if the steps are.

    The mean of losses over the batches is not, if a loss is a sum over the samples of a
    batch.
    """
    if all(loss.reduction != "sum" for loss in _existing(keras.losses.Loss)):
        return results
    return {name: value for name, value in results.items() if "loss" not in name}


def _existing(cls: type) -> list[Any]:
    """Return all objects of a class; the script does not say which ones it uses."""
    return [each for each in gc.get_objects() if isinstance(each, cls)]


def _names(layers: Iterable[keras.layers.Layer]) -> list[str]:
    return sorted({layer.name for layer in layers})


def _normalizes_locally(layer: keras.layers.Layer) -> bool:
    is_batch = isinstance(layer, keras.layers.BatchNormalization)
    # Keras' own `synchronized` spans the devices of a process.
    return is_batch and layer.trainable and type(layer)._moments is _LOCAL_MOMENTS


_LOCAL_MOMENTS = keras.layers.BatchNormalization._moments


def _named(variables: Iterable[Any]) -> dict[str, Any]:
    """Return distinct variables by their paths, with a number where these are equal."""
    named: dict[str, Any] = {}
    for variable in {id(variable): variable for variable in variables}.values():
        path = getattr(variable, "path", variable.name)
        number = sum(name.partition(" #")[0] == path for name in named)
        named[f"{path} #{number + 1}" if number else path] = variable
    return named


def _draws(models: Iterable[keras.Model]) -> Iterator[tuple[str, int]]:
    for model in models:
        for variable in model.variables:
            if variable.path.endswith("seed_generator_state"):
                # Keras counts in the second number; the first is the seed.
                yield variable.path, int(variable.numpy()[1])


def _combined(aggregation: str, values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the state of a metric over all ranks, as `keras.metrics` of hvdtrain."""
    if aggregation == "only_first_replica":
        return values[0]
    total = np.sum(values, axis=0)
    return (total / len(values) if aggregation == "mean" else total).astype(
        values[0].dtype
    )
