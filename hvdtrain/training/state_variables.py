"""The variables of a training: which are stored once, and which for each replica."""

import dataclasses

import keras
import tensorflow as tf

from hvdtrain.job.world import JobError
from hvdtrain.keras.dense_values import DenseValues, DenseVariable
from hvdtrain.keras.groups import variable_key
from hvdtrain.keras.metrics import metric_variables
from hvdtrain.keras.optimizer_state import accumulated_gradients
from hvdtrain.keras.partition import assign_part, has_summed_gradients
from hvdtrain.keras.variables import shared_variables


@dataclasses.dataclass(frozen=True)
class StateVariables:
    """The variables of a model and its optimizer, as those of the dense model.

    Attributes:
        shared: list of `DenseVariable` that are equal on all ranks, or divided.
        own: list of those of which each replica of the dense model has its own. It is
            the same list whether a table is divided, and on any number of ranks.
        accumulated: numbers in `own` of the accumulated gradients.
        metrics: list of the states of metrics.
    """

    shared: list
    own: list
    accumulated: range
    metrics: list

    @classmethod
    def of(cls, model):
        """Return those of a model. A collective where it is a pipeline.

        Args:
            model: a built and compiled model whose optimizer is built.
        """
        describe = getattr(model, "dense_variables", _dense_variables)
        shared, trainable = _shared(model), _trainable(model)
        weights = [v for v in shared if id(v) in trainable]
        optimizer_variables = [v for v in shared if id(v) not in trainable]
        metrics = metric_variables(model.metrics)
        accumulated = accumulated_gradients(model.optimizer)
        taken = {*map(id, (*weights, *optimizer_variables, *metrics, *accumulated))}
        own = [
            each
            for variables in (model.variables, model.optimizer.variables)
            for each in describe([v for v in variables if id(v) not in taken])
        ]
        own += _dense_variables(untracked(model))
        # Also those of other stages of a pipeline.
        accumulated = describe(accumulated)
        return cls(
            shared=[*describe(weights), *describe(optimizer_variables)],
            own=[*own, *accumulated],
            accumulated=range(len(own), len(own) + len(accumulated)),
            metrics=metrics,
        )

    @property
    def tables(self):
        """Those of `own` that replicas have parts of, by number.

        They are frozen tables that are divided over more than one replica, and
        accumulated gradients of such tables. `regrouping` is for other numbers.
        """
        return {
            number: each
            for number, each in enumerate(self.own)
            if has_summed_gradients([each.variable])
        }

    @property
    def per_replica(self):
        """Those of `own` that each replica has, by number."""
        tables = self.tables
        return {
            number: each for number, each in enumerate(self.own) if number not in tables
        }

    @property
    def stored_once(self):
        """List of `shared`, then `tables`."""
        return [*self.shared, *self.tables.values()]

    def scale_accumulated(self, factor):
        """Multiply the accumulated gradients of divided tables, which are sums.

        Args:
            factor: replicas now, by replicas that wrote them: the sum over replicas is
                divided by their number when the window is complete.
        """
        for number, each in self.tables.items():
            if number in self.accumulated and factor != 1:
                each.variable.assign(each.variable * factor)

    def values_stored_once(self):
        """Return the dense values on the chief. A collective if some are divided."""
        if self._are_whole():
            return [variable.local_value() for variable in self.stored_once]
        values = DenseValues(self.stored_once)
        return [values.gather(number) for number in range(len(values.variables))]

    def scatter(self, dense):
        """Assign to all ranks their parts. A collective if some variables are divided.

        Args:
            dense: list of the dense values of `stored_once` on the chief; not used
                elsewhere.
        """
        if self._are_whole():
            return
        values = DenseValues(self.stored_once)
        for number in range(len(values.variables)):
            values.scatter(number, dense and dense[number])

    def _are_whole(self):
        return all(each.is_whole for each in self.stored_once)


def _dense_variables(variables):
    return list(map(DenseVariable.of, variables))


def shared_weights(model):
    """Return the trainable weights that are equal on all ranks, or divided."""
    trainable = _trainable(model)
    return [v for v in _shared(model) if id(v) in trainable]


def _trainable(model):
    return {id(variable) for variable in model.trainable_variables}


def _shared(model):
    fixed = {variable_key(weight) for weight in model.non_trainable_weights}
    return [v for v in shared_variables(model) if variable_key(v) not in fixed]


def untracked(model):
    """Return the variables of a model that are in none of Keras' lists.

    They are those of optimizers that are attributes of it, beside that of `compile`,
    and TensorFlow's own variables in layers.

    Raises:
        JobError: such an optimizer is not built.
    """
    variables = []
    for name, each in vars(model).items():
        is_own = isinstance(each, keras.optimizers.Optimizer)
        if is_own and each is not model.optimizer:
            if not each.built:
                raise JobError(
                    f"Received a model with a second optimizer, {name}, that has no "
                    "variables yet, so that checkpoints could not contain them: call "
                    "its build(variables) in model_fn."
                )
            variables += each.variables
    for layer in model._flatten_layers():
        variables += [v for v in vars(layer).values() if isinstance(v, tf.Variable)]
    return variables


def assign(variables, values):
    """Assign dense values, or this rank's parts of them, to variables in order.

    Args:
        variables: list of `DenseVariable`.
        values: list of arrays.
    """
    for described, value in zip(variables, values, strict=True):
        if described.variable is not None:
            assign_part(described.variable, value)
