"""The dense model of a pipeline: its config, and its variables over all stages."""

import contextlib
import dataclasses

import keras

from hvdtrain.collectives.objects import allgather_object
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.job.agreement import on_chief
from hvdtrain.job.backend import world
from hvdtrain.job.world import JobError
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


def gather(pipeline):
    """Return the dense model and its optimizer's state on rank 0, None elsewhere.

    A collective of all ranks of the job.

    Args:
        pipeline: the `PipelineModel`.
    """
    model, described = None, _described(pipeline)
    if global_process_set.rank() == 0:
        model = pipeline.dense.build(pipeline.get_compile_config())
    targets = _by_path(model)
    values = DenseValues(described)
    for number, each in enumerate(described):
        value = values.gather(number)
        if targets:
            targets[each.path].assign(value)
    return model


def load(pipeline, filepath, options):
    """Assign what rank 0 reads from a file of the dense model. A collective.

    Args:
        pipeline: the `PipelineModel`.
        filepath: the file.
        options: further arguments of `keras.Model.load_weights`, as a dict.

    Raises:
        JobError: on all ranks, if it cannot be read.
    """

    def read():
        model = pipeline.dense.build(pipeline.get_compile_config())
        try:
            model.load_weights(filepath, **options)
        except (OSError, ValueError) as error:
            raise JobError(f"Cannot load {filepath}: {error}") from error
        return model

    sources = _by_path(on_chief(world(), read))
    described = _described(pipeline)
    values = DenseValues(described)
    for number, each in enumerate(described):
        values.scatter(number, sources and sources[each.path].numpy())


def _described(pipeline):
    slots = variables_of(pipeline.optimizer)
    weights = pipeline.dense_variables(pipeline.weights)
    return [*weights, *pipeline.dense_variables(slots)]


def _by_path(model):
    """Return the variables of a dense model and its optimizer; None for None."""
    if model is None:
        return None
    variables = [*model.weights, *variables_of(model.optimizer)]
    return {variable.path: variable for variable in variables}
