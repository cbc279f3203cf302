"""`adapt`: Keras' preprocessing layers learn from the samples of all ranks."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.objects import broadcast_object, gather_object
from hvdtrain.data.batching import one_pass
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import check_same, fail_together, on_all
from hvdtrain.keras.adapted_state import AdaptedState, is_adaptable, make_state
from hvdtrain.output import describe
from hvdtrain.training.inputs import as_samples, check_source

# Errors of Keras, TensorFlow and sources, which are one line without a traceback.
_EXPECTED = (ValueError, TypeError, RuntimeError, tf.errors.OpError)


def adapt(
    layers: Any,
    source: Any,
    *,
    world: World,
    select: Callable[[Any], Any] | None = None,
    local_batch_size: int = 1024,
    workers: int | None = None,
) -> None:
    """Adapt preprocessing layers to all samples of a source. A collective.

    Each rank reads its share of the source, once for all layers. Then what the ranks
    have counted is added, and every layer is the same on all ranks, and as Keras'
    `layer.adapt(samples)` makes it in one process::

        training.adapt({"age": normalization, "city": lookup}, source, world=world)

    Vocabularies of `StringLookup`, `IntegerLookup` and `TextVectorization` are exactly
    those of one process, also among tokens that are equally frequent, and so are the
    weights of TF-IDF. Mean and variance of `Normalization` are equal up to rounding:
    they are summed in float64. The bins of `Discretization` are exactly those of one
    process for up to 2**20 values of the feature over all ranks. Of more values, each
    2**20 are summarized, and the summaries merged as Keras merges those of batches:
    the bins then depend on the number of ranks, and the share of samples below a
    boundary is off by the layer's `epsilon` or a few times that.

    The memory of a rank grows with the vocabulary, and not with the samples; on rank 0
    with the vocabularies of all ranks.

    Args:
        layers: a layer; a dictionary of layers by the key of the sample, where a layer
            may have several keys; a `keras.utils.FeatureSpace`; or a functional model,
            of which all layers are adapted that are connected to its inputs. Of the
            last two, layers that were made with a vocabulary, moments or bins stay.
        source: as for `data.batches`. Of a sample that is a tuple, as for
            `training.fit`, the first element is taken: the inputs.
        world: what `job.start` returned.
        select: returns the inputs, or a feature, of a batch of samples: a function of
            its tensors, of shape (samples, ...), traced by tf.data.
        local_batch_size: samples that a rank reads at a time; fewer if they are large.
        workers: see `data.batches`.

    Raises:
        JobError: on all ranks, if a layer cannot be adapted or has no such feature in
            the samples, if a feature has another type or shape than the layer takes, if
            a sample cannot be read, or if the source differs between the ranks.
    """
    with fail_together(world):
        samples = as_samples(source)
        target = _find_layers(layers)
        states = {id(layer): make_state(layer) for _, layer in target.layers}
        fingerprint = samples.fingerprint()
    described = [f"{key}: {type(layer).__name__}" for key, layer in target.layers]
    check_same(world, {"layers": ", ".join(described), "source": fingerprint})
    check_source(samples, world, remedy="adapt deals it.")
    with fail_together(world), _one_line():
        batches = one_pass(
            samples,
            rank=world.rank,
            size=world.size,
            local_batch_size=local_batch_size,
            workers=workers,
        )
        if select:
            batches = _selected(batches, select)
        _prepare(target, states, batches.element_spec)
    error = on_all(
        world,
        functools.partial(_update, target, states, batches),
        name="the samples of adapt",
    )
    with fail_together(world):
        if error:
            raise error
    _add_ranks(list(states.values()), world)
    with fail_together(world), _one_line():
        for state in states.values():
            state.finish()
        target.complete()


@dataclasses.dataclass
class _Target:
    """Layers with the feature that each learns from.

    Attributes:
        layers: pairs of feature and layer; the feature None is all inputs.
        names: of the inputs of a model, in their order.
        complete: called after the layers are adapted.
    """

    layers: Sequence[tuple[Any, keras.layers.Layer]]
    names: Sequence[str] = ()
    complete: Callable[[], None] = lambda: None

    def pick(self, sample: Any, key: Any) -> Any:
        """Return a feature of samples, or of their specs."""
        inputs = sample[0] if isinstance(sample, tuple) else sample
        if key is None and not isinstance(inputs, Mapping | tuple):
            return inputs
        if isinstance(inputs, Mapping):
            if key in inputs:
                return inputs[key]
            received = f"samples with the keys {', '.join(map(str, inputs))}"
        elif isinstance(inputs, tuple) and len(inputs) == len(self.names):
            return inputs[self.names.index(key)]
        elif self.names == [key]:
            return inputs
        else:
            received = "samples without keys"
        wanted = "one feature: pass select=" if key is None else f"the feature {key}"
        raise JobError(f"Received {received}; expected {wanted}.")


def _find_layers(layers: Any) -> _Target:
    if isinstance(layers, keras.utils.FeatureSpace):
        target = _of_feature_space(layers)
    elif isinstance(layers, keras.Model):
        target = _of_model(layers)
    else:
        pairs = layers.items() if isinstance(layers, Mapping) else [(None, layers)]
        target = _Target(list(pairs))
    if not target.layers:
        raise JobError(
            f"Received {layers!r:.80} without a layer that learns from samples."
        )
    return target


def _of_feature_space(space: keras.utils.FeatureSpace) -> _Target:
    def complete() -> None:
        # As `space.adapt` does at its end.
        space._is_adapted = True
        space.get_encoded_features()
        space.built = space._sublayers_built = True

    found = [pair for pair in space.preprocessors.items() if is_adaptable(pair[1])]
    return _Target(found, complete=complete)


def _of_model(model: keras.Model) -> _Target:
    inputs = getattr(model, "inputs", None) or []
    names = [tensor._keras_history.operation.name for tensor in inputs]
    layers = list(model._flatten_layers())
    texts = [x for x in layers if isinstance(x, keras.layers.TextVectorization)]
    inside = {x for each in texts for x in each._flatten_layers(include_self=False)}
    found = []
    for layer in filter(is_adaptable, layers):
        ids = {id(x) for node in layer._inbound_nodes for x in node.input_tensors}
        keys = [n for n, x in zip(names, inputs, strict=True) if id(x) in ids]
        if not keys and layer not in inside:
            raise JobError(
                f"Received a model whose layer {layer.name} is not connected to one of "
                f"its inputs ({', '.join(names) or 'none'}); expected layers that are: "
                "adapt this one alone, before the model is made."
            )
        found += [(key, layer) for key in keys]
    return _Target(found, names=names)


def _selected(
    batches: tf.data.Dataset, select: Callable[[Any], Any]
) -> tf.data.Dataset:
    # tf.data passes the elements of a tuple as arguments.
    if isinstance(batches.element_spec, tuple):
        return batches.map(lambda *sample: select(sample))
    return batches.map(select)


def _prepare(target: _Target, states: Mapping[int, AdaptedState], specs: Any) -> None:
    for key, layer in target.layers:
        state, spec = states[id(layer)], target.pick(specs, key)
        if not state.accepts(spec.dtype):
            raise JobError(
                f"Received {spec.dtype.name} of shape {spec.shape} for the layer "
                f"{layer.name}; expected {state.expected}."
            )
        with _one_line(f" the layer {layer.name}"):
            state.prepare(spec.shape)


def _update(
    target: _Target, states: Mapping[int, AdaptedState], batches: tf.data.Dataset
) -> Exception | None:
    """Read this rank's samples, and return the error by which this ended."""
    try:
        with _one_line():
            for batch in batches:
                for key, layer in target.layers:
                    with _one_line(f" the layer {layer.name}"):
                        states[id(layer)].update(target.pick(batch, key))
    except Exception as error:
        return error
    return None


def _add_ranks(states: Sequence[AdaptedState], world: World) -> None:
    """Give each state the samples of all ranks. A collective."""
    if world.size == 1:
        return
    exported_by_rank = gather_object([x.export() for x in states], name="adapt") or []
    with fail_together(world):
        for exported in exported_by_rank[1:]:
            for state, value in zip(states, exported, strict=True):
                state.add(value)
    added = broadcast_object([x.export() for x in states], name="adapted")
    # On rank 0 as well: all ranks then compute the same to the last bit.
    for state, value in zip(states, added, strict=True):
        state.reset()
        state.add(value)


@contextlib.contextmanager
def _one_line(name: str = "") -> Iterator[None]:
    """Raise a `JobError` in place of errors of Keras, TensorFlow and sources."""
    try:
        yield
    except JobError:
        raise
    except _EXPECTED as error:
        text = " ".join(describe(error)[0].split())
        raise JobError(f"Cannot adapt{name}: {text}") from error
