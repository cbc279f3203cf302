"""Records the state of a training after each step."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.keras import metrics
from hvdtrain.keras.layers import made_untrained, normalizes_over_ranks
from hvdtrain.keras.loss_reductions import find_kind
from hvdtrain.keras.replication import get_hook
from hvdtrain.keras.unlisted import learned_state
from hvdtrain.keras.variables import (
    Optimizer,
    non_local_state,
    optimizers_inside,
)
from hvdtrain.sharding.shards import is_split_over_ranks
from hvdtrain.verify.first_gradients import FirstGradients
from hvdtrain.verify.graph_constants import constants
from hvdtrain.verify.left_out import left_out_layers
from hvdtrain.verify.noise import Draws
from hvdtrain.verify.trajectory import (
    Directory,
    Facts,
    Reductions,
    State,
    digest,
)
from hvdtrain.verify.variable_names import VariableNames

_MOVING = ("/moving_mean", "/moving_variance", "/seed_generator_state")


class FinishedError(BaseException):
    """Ends the script after the last step; `except Exception` does not catch it."""


class StepRecorder:
    """Writes the state of a training after each step.

    Args:
        files: the files of this phase.
        rank: the rank of this process.
        steps: the number of steps after which the script ends; with gradient
            accumulation not before two windows.
        on_steps: called after steps, with the number of steps since the last call.
        has_variables: whether states contain the values of variables.
        recorded: the files of the first phase, from which later ones take the weights.
        compared_ranks: in the reference, the number of ranks of the first phase, whose
            metrics are combined.
        divisor: of all gradients.

    Attributes:
        names: the names of all variables.
        gradients: of the first step; others write them.
        reductions: how gradients are reduced; others write it.
        graph: in which they are reduced first; others write it.
        are_means: by loss, whether it is a mean over samples; others write it.
        class_weights: the arguments of this name as text; others write it.
        draws: of which generators the numbers are those of the ranks; others write it.
    """

    def __init__(
        self,
        files: Directory,
        *,
        rank: int,
        steps: int,
        on_steps: Callable[[int], None],
        has_variables: bool = True,
        recorded: Directory | None = None,
        compared_ranks: int = 0,
        divisor: float = 1.0,
    ) -> None:
        self._files = files
        self._rank = rank
        self._steps = steps
        self._on_steps = on_steps
        self._has_variables = has_variables
        self._recorded = recorded
        self._compared_ranks = range(compared_ranks)
        self._optimizers: list[Optimizer] = []
        # The iterations of each optimizer at the last step.
        self._iterations: list[int] = []
        # The number of reductions that were traced before.
        self._reductions = 0
        self._unreduced: list[str] = []
        self._models: list[keras.Model] = []
        self._done = 0
        self.names = VariableNames()
        self.gradients = FirstGradients(self.names, divisor=divisor)
        self.reductions = Reductions()
        self.graph: tf.Graph | None = None
        self.are_means: dict[keras.losses.Loss, bool] = {}
        self.class_weights: list[str] = []
        self.draws = Draws()

    def add(self, optimizer: Optimizer) -> None:
        """Follow the steps of an optimizer that has been built."""
        if any(optimizer is known for known in self._optimizers):
            return
        _check_full_state(optimizer)
        number = len(self._optimizers)
        self._optimizers.append(optimizer)
        self._iterations.append(0)
        weights = self.names.by_name(optimizer._trainable_variables)
        with tf.init_scope():
            if self._recorded:
                self._take_start(weights, number)
            start = self._values(weights)
        self._files.write("start", self._rank, number, value=start)

    def _take_start(self, weights: Mapping[str, keras.Variable], number: int) -> None:
        """Assign the weights with which rank 0 has started in the first phase."""
        values = self._recorded and self._recorded.read("start", 0, number)
        for name, value in (values or {}).items():
            # Weights that are made while a step is traced have no value yet. Those of
            # rank 0 get the same one in both phases, from the same seed.
            if name in weights and value.shape == tuple(weights[name].shape):
                weights[name].assign(value)

    def record(self) -> None:
        """Write the state if there was a step since the last call.

        Raises:
            FinishedError: it was the last step.
        """
        iterations = [int(optimizer._iterations) for optimizer in self._optimizers]
        pairs = zip(iterations, self._iterations, strict=True)
        steps = max((new - old for new, old in pairs), default=0)
        if steps <= 0:
            return
        started = [
            optimizer
            for optimizer, new, old in zip(
                self._optimizers, iterations, self._iterations, strict=True
            )
            if new and not old
        ]
        self._iterations = iterations
        if not self._done:
            models = _instances_of(keras.Model)
            self._models = sorted(
                models, key=lambda each: self.names.place(each.weights)
            )
            self._check_replicated()
        if started:
            self._note_unreduced(started)
            self._files.write("facts", self._rank, value=self._facts())
        self._on_steps(steps)
        self._done += steps
        state = self._state(self._done)
        self._files.write("state", self._rank, self._done, value=state)
        # Weights change at the end of a window.
        windows = [each.gradient_accumulation_steps or 0 for each in self._optimizers]
        if self._done >= max(self._steps, 2 * max(windows)):
            raise FinishedError

    def _note_unreduced(self, started: Sequence[Optimizer]) -> None:
        """Note optimizers that have done their first step without a reduction."""
        number = len(self.reductions.kinds)
        # A tape may reduce for several optimizers in one trace.
        is_by_tape = not any(get_hook(each) for each in self._optimizers)
        if number == self._reductions and not is_by_tape:
            self._unreduced += [each.name for each in started if not _is_hooked(each)]
        self._reductions = number

    def digests(self, variables: Iterable[Any]) -> dict[str, str]:
        """Return digests of the values of variables, by name."""
        with tf.init_scope():
            return {
                name: self._digest(variable)
                for name, variable in self.names.by_name(variables).items()
            }

    def _digest(self, variable: Any) -> str:
        value = keras.ops.convert_to_numpy(variable)
        # One that is made while a step is traced was not broadcast before this step.
        has_value = value.shape == tuple(variable.shape)
        return digest(value) if has_value else f"made on rank {self._rank}"

    def _check_replicated(self) -> None:
        weights = [v for model in self._models for v in model.weights]
        if is_split_over_ranks(weights):
            raise ValueError(
                "Received a model that is sharded over ranks; expected one that each "
                "rank has as a whole: a verification cannot put it into one process."
            )

    def _state(self, step: int) -> State:
        measured = [metric for metric in self._metrics() if _is_sum(metric)]
        states = metrics.local_states(metrics.metric_variables(measured))
        return State(
            variables=self._values(self.names.by_name(self._variables())),
            learning_rates=self._learning_rates(),
            metric_states=states,
            metrics=_comparable(metrics.results(measured, states)),
            metrics_of_ranks=self._metrics_of_ranks(measured, step),
        )

    def _metrics(self) -> Iterator[keras.Metric]:
        for metric in (metric for model in self._models for metric in model.metrics):
            # The metrics of `compile` are in a container, whose names have the output.
            inside = getattr(metric, "metrics", None)
            if isinstance(inside, list) and not _is_sum(metric):
                yield from inside
            else:
                yield metric

    def _variables(self) -> Iterator[Any]:
        if not self._has_variables:
            return
        for model in self._models:
            yield from model.weights
        for optimizer in self._optimizers:
            yield from optimizer._trainable_variables
            yield from non_local_state(optimizer, optimizer._trainable_variables)

    def _learning_rates(self) -> dict[str, float]:
        rates: dict[str, float] = {}
        for optimizer in self._optimizers:
            number = sum(name.partition(" #")[0] == optimizer.name for name in rates)
            name = f"{optimizer.name} #{number + 1}" if number else optimizer.name
            rates[name] = float(optimizer.learning_rate)
        return rates

    def _metrics_of_ranks(
        self, measured: Sequence[keras.Metric], step: int
    ) -> dict[str, Any] | None:
        files, ranks = self._recorded, self._compared_ranks
        states = [files.read("state", rank, step) for rank in ranks] if files else []
        if not states or None in states:
            return None
        variables, size = metrics.metric_variables(measured), len(states)
        sent = [
            metrics.addends(variables, state.metric_states, metrics.Share(i, size))
            for i, state in enumerate(states)
        ]
        totals = [tf.add_n(addends) for addends in zip(*sent, strict=True)]
        combined = metrics.combined(variables, totals, size)
        return _comparable(metrics.results(measured, combined))

    def _values(self, variables: dict[str, Any]) -> dict[str, Any]:
        values = {
            name: np.array(keras.ops.convert_to_numpy(variable))
            for name, variable in variables.items()
        }
        return values if self._rank == 0 else {n: digest(v) for n, v in values.items()}

    def _facts(self) -> Facts:
        layers = [layer for model in self._models for layer in model._flatten_layers()]
        self.reductions.constants = constants(self.graph)
        return Facts(
            reductions=self.reductions,
            loss_reductions=_loss_reductions(),
            local_normalizations=_names(
                layer for layer in layers if _normalizes_locally(layer)
            ),
            masking_layers=_names(
                layer
                for layer in layers
                if isinstance(layer, keras.layers.Masking)
                or getattr(layer, "mask_zero", False)
            ),
            regularized_layers=_names(layer for layer in layers if _adds_losses(layer)),
            learned={
                value.name: value.text
                for layer in [*self._models, *_adapted_outside(layers)]
                for value in learned_state(layer)
            },
            class_weights="; ".join(self.class_weights),
            seeds=_seeds(layers),
            batch_losses=[
                str(loss.name)
                for loss, is_mean in self.are_means.items()
                if not is_mean
            ],
            unreduced=self._unreduced,
            trained=self._trained(),
            untrained=self._untrained(),
            made_untrained=[
                name
                for model in self._models
                for name in self.names.by_name(made_untrained(model).values())
            ],
            gradients=self.gradients.norms(),
            other_draws=_names(layer for layer in layers if self._draws_apart(layer)),
            left_out=list(self._left_out(layers)),
        )

    def _trained(self) -> list[str]:
        pairs = zip(self._optimizers, self._iterations, strict=True)
        used = [optimizer for optimizer, iterations in pairs if iterations]
        variables = [v for each in used for v in each._trainable_variables]
        return list(self.names.by_name(variables))

    def _untrained(self) -> dict[str, str]:
        trained = {
            id(v) for each in self._optimizers for v in each._trainable_variables
        }
        weights = [v for model in self._models for v in model.weights]
        untrained = [v for v in weights if id(v) not in trained]
        return {
            name: digest(np.array(keras.ops.convert_to_numpy(variable)))
            for name, variable in self.names.by_name(untrained).items()
            if not name.partition(" #")[0].endswith(_MOVING)
        }

    def _draws_apart(self, layer: keras.layers.Layer) -> bool:
        """Return whether a layer has drawn numbers that are not those of the ranks."""
        # Keras counts draws in the second number of a state.
        states = [each.state for each in layer._seed_generators]
        drawn = self.names.by_name(state for state in states if int(state.numpy()[1]))
        return bool(drawn.keys() - (self.draws.matched - self.draws.unmatched))

    def _left_out(self, layers: Sequence[keras.layers.Layer]) -> Iterator[str]:
        yield from left_out_layers(layers)
        for metric in self._metrics():
            if not _is_sum(metric):
                yield f"the metric {metric.name}, whose state is not known to be a sum"
            elif metric.name not in _comparable({metric.name: 0}):
                yield f"the metric {metric.name}, a mean of sums over batches"


def _comparable(results: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that are equal if the steps are.

    The mean of losses over the batches is not, if a loss is a sum over the samples of a
    batch.
    """
    if "sum" not in _loss_reductions():
        return results
    return {name: value for name, value in results.items() if "loss" not in name}


def _loss_reductions() -> list[str]:
    # The container that `compile` makes of the losses has a reduction of its own.
    return [
        find_kind(loss.reduction)
        for loss in _instances_of(keras.losses.Loss)
        if type(loss).__name__ != "CompileLoss"
    ]


def _instances_of(cls: type) -> list[Any]:
    """Return all objects of a class; the script does not say which ones it uses."""
    # `isinstance` would ask a weak proxy for the class of an object that may be gone.
    return [each for each in gc.get_objects() if issubclass(type(each), cls)]


def _adapted_outside(
    inside: Sequence[keras.layers.Layer],
) -> list[keras.layers.Layer]:
    """Return layers that learn from samples and are in no model: in a dataset, say.

    A layer that is not called may have served for its moments alone, which a script
    then reduces over the ranks.
    """
    layers = [
        layer
        for layer in _instances_of(keras.layers.Layer)
        if hasattr(layer, "adapt") and layer._called
    ]
    known = {id(layer) for layer in inside}
    # A layer of text contains one with its vocabulary.
    for layer in layers:
        known |= {id(x) for x in layer._flatten_layers(include_self=False)}
    return [layer for layer in layers if id(layer) not in known]


def _seeds(layers: Iterable[keras.layers.Layer]) -> dict[str, int]:
    """Return the first seeds of layers that draw numbers in a job, by name."""
    return {
        layer.name: int(state[0])
        for layer in layers
        for state in [each.state.numpy() for each in layer._seed_generators[:1]]
        # Those that are left out do not draw here.
        if int(state[1]) or any(left_out_layers([layer]))
    }


def _check_full_state(optimizer: Optimizer) -> None:
    hook = get_hook(optimizer)
    if hook and hook.sharded_state:
        raise ValueError(
            "Received shard_state=True; expected False: a verification compares full "
            "optimizer state, and sharded state has the same updates."
        )


def _is_hooked(optimizer: Optimizer) -> bool:
    return any(map(get_hook, [optimizer, *optimizers_inside(optimizer)]))


def _is_sum(metric: keras.Metric) -> bool:
    return all(metrics.are_sums([metric]))


def _names(layers: Iterable[keras.layers.Layer]) -> list[str]:
    return sorted({layer.name for layer in layers})


def _adds_losses(layer: keras.layers.Layer) -> bool:
    inside = list(layer._flatten_layers(include_self=False))
    return bool(layer.losses) and not inside


def _normalizes_locally(layer: keras.layers.Layer) -> bool:
    is_batch = isinstance(layer, keras.layers.BatchNormalization)
    is_local = is_batch and type(layer)._moments is _LOCAL_MOMENTS
    return is_local and layer.trainable and not normalizes_over_ranks(layer)


# `keras.distribution` replaces it.
_LOCAL_MOMENTS = keras.layers.BatchNormalization._moments
