"""The dense model of a pipeline: its config, and its variables over all stages."""

import contextlib
import dataclasses

import keras

from hvdtrain.collectives.objects import allgather_object
from hvdtrain.keras.dense_values import DenseValues, DenseVariable


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseModel:
    """The dense model without its values.

    Attributes:
        model_class: `keras.Sequential` or the class of functional models.
        config: its config.
        custom_objects: its layers' classes by name.
        scope: the first part of its variables' paths, which a Sequential has.
    """

    model_class: type
    config: dict
    custom_objects: dict
    scope: str

    def build(self, compile_config=None):
        """Return the dense model with new initial values.

        Args:
            compile_config: of `get_compile_config`, to compile it as well.
        """
        with in_scope(self.scope):
            model = self.model_class.from_config(self.config, self.custom_objects)
        if compile_config:
            model.compile_from_config(compile_config)
        return model


def scope_of(model):
    """Return what the paths of a model's variables have before the layers' names."""
    for layer in model.layers:
        for variable in layer.variables:
            before, found, _ = variable.path.partition(f"{layer.name}/")
            if found:
                return before.removesuffix("/")
    return ""


@contextlib.contextmanager
def in_scope(scope):
    """Give variables that are made in the block paths that begin with `scope`."""
    with contextlib.ExitStack() as stack:
        for name in filter(None, scope.split("/")):
            stack.enter_context(keras.name_scope(name))
        yield


def variables_of(optimizer):
    """Return the variables of an optimizer, which may be None."""
    return optimizer.variables if optimizer else []


def describe(variables, optimizer, pipeline):
    """Return the variables of all stages as `DenseVariable`s. A collective.

    Args:
        variables: list of this rank's variables.
        optimizer: the optimizer; those of its variables that all stages have, such as
            the number of iterations, are one.
        pipeline: the axis of the mesh.
    """
    of_optimizer = {id(variable) for variable in variables_of(optimizer)}
    mine = [(DenseVariable.of(v), id(v) in of_optimizer) for v in variables]
    sent = [
        (dataclasses.replace(described, variable=None), is_common)
        for described, is_common in mine
    ]
    stages = allgather_object(
        sent, name="StageVariables", process_set=pipeline.process_set
    )
    own = {each.path: each for each, is_common in mine if is_common}
    stages[pipeline.index] = mine
    found = {}
    for stage, entries in enumerate(stages):
        for number, (described, is_common) in enumerate(entries):
            # The states of random layers may have equal paths.
            key = described.path if is_common else (stage, number)
            found.setdefault(key, own.get(key, described))
    return list(found.values())


def gather(described, targets):
    """Assign values of all stages to the variables of a dense model. A collective.

    Args:
        described: list of `DenseVariable`.
        targets: variables by path on rank 0; None elsewhere.
    """
    values = DenseValues(described)
    for number, each in enumerate(described):
        value = values.gather(number)
        if targets is not None:
            targets[each.path].assign(value)


def scatter(described, sources):
    """Assign the values of a dense model to the stages. A collective.

    Args:
        described: list of `DenseVariable`.
        sources: variables by path on rank 0; None elsewhere.
    """
    values = DenseValues(described)
    for number, each in enumerate(described):
        values.scatter(number, sources and sources[each.path].numpy())
