"""`adapt`: Keras' preprocessing layers learn from the samples of all ranks."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.objects import broadcast_object, gather_object
from hvdtrain.collectives.process_sets import is_elastic
from hvdtrain.data.batching import one_pass
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import check_same, fail_together, on_all
from hvdtrain.keras.adapted_state import AdaptedState, is_adaptable, make_state
from hvdtrain.output import describe
from hvdtrain.training.inputs import as_samples, check_source

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

    Each rank reads its share of the source, once for all layers, and what the ranks
    have counted is added. All ranks then have the layers that `layer.adapt(samples)`
    makes in one process::

        training.adapt({"age": normalization, "city": lookup}, source, world=world)

    Vocabularies and TF-IDF weights equal the ones that one process computes, mean and
    variance up to rounding. The bins of `Discretization` are equal for up to 2**20
    values of all ranks. Of more, each 2**20 are summarized, and the summaries merged,
    as Keras does for each batch: the bins then depend on the number of ranks, and the
    share of samples below a boundary is off by the layer's `epsilon`, or a few times
    that. Memory grows with the vocabularies, which rank 0 collects from all ranks. In
    an elastic job each rank reads all samples, since a rank that joins later is alone.

    Args:
        layers: a layer; a dictionary of layers by the key of the sample, where a layer
            may have several keys; a `keras.utils.FeatureSpace`; or a functional model,
            whose layers read inputs by name. The layers of these two that were made
            with a vocabulary, moments or bins keep them.
        source: as for `data.batches`. Of samples that are tuples, as for `fit`, the
            layers get the first element: the inputs.
        select: returns the inputs, or one feature, of the tensors of a batch of
            samples, which have the shape (samples, ...).
        local_batch_size: samples that a rank reads at a time; fewer if they are large.
        world, workers: as for `fit`.

    Raises:
        JobError: on all ranks, if a layer cannot be adapted or does not take such a
            feature, a sample cannot be read, or the source differs between the ranks.
    """
    world = World() if is_elastic() else world
    with fail_together(world), _one_line():
        samples, found = as_samples(source), _find_layers(layers)
        states = {layer: make_state(layer) for _, layer in found}
        names = ", ".join(f"{key}: {type(layer).__name__}" for key, layer in found)
        fingerprint = samples.fingerprint()
    check_same(world, {"layers": names, "source": fingerprint})
    check_source(samples, world)
    with fail_together(world), _one_line():
        share: dict[str, Any] = {"rank": world.rank, "size": world.size}
        share |= {"local_batch_size": local_batch_size, "workers": workers}
        batches = one_pass(samples, **share)

    def read() -> Exception | None:
        try:
            for state in states.values():
                state.reset()
            for inputs in map(select, batches) if select else batches:
                for key, layer in found:
                    with _one_line(f" the layer {layer.name}"):
                        states[layer].update(_pick(inputs, key))
        except Exception as error:
            return error
        return None

    error = on_all(world, read, name="the samples of adapt")
    with fail_together(world), _one_line():
        if error:
            raise error
    _add_ranks(list(states.values()), world)
    with fail_together(world), _one_line():
        for state in states.values():
            state.finish()
        if isinstance(layers, keras.utils.FeatureSpace):
            # As its `adapt` does at its end.
            layers._is_adapted = True
            layers.get_encoded_features()
            layers.built = layers._sublayers_built = True


def _find_layers(layers: Any) -> list[tuple[Any, Any]]:
    """Return pairs of feature and layer; the feature None is all inputs."""
    found: Iterable[tuple[Any, Any]] = [(None, layers)]
    if isinstance(layers, Mapping):
        found = layers.items()
    elif isinstance(layers, keras.utils.FeatureSpace):
        found = [x for x in layers.preprocessors.items() if is_adaptable(x[1])]
    elif isinstance(layers, keras.Model):
        found = _layers_of_model(layers)
    if not (pairs := list(found)):
        raise JobError(f"Received {layers!r:.80}; expected layers of inputs to adapt.")
    return pairs


def _layers_of_model(model: keras.Model) -> Iterator[tuple[Any, Any]]:
    inputs = {x._keras_history.operation.name: x for x in getattr(model, "inputs", ())}
    for layer in filter(is_adaptable, model._flatten_layers()):
        # Without a node: the lookup layer that TextVectorization contains and adapts.
        nodes = layer._inbound_nodes
        ids = {id(x) for node in nodes for x in node.input_tensors}
        keys = [name for name, x in inputs.items() if id(x) in ids]
        if nodes and not keys:
            raise JobError(
                f"Received a model with the layer {layer.name}, which is not connected "
                f"to one of its inputs, {', '.join(inputs)}: adapt it by itself."
            )
        yield from ((key if len(inputs) > 1 else None, layer) for key in keys)


def _pick(sample: Any, key: Any) -> Any:
    """Return a feature of samples; all inputs for the key None."""
    inputs = sample[0] if isinstance(sample, tuple) else sample
    if key is None and not isinstance(inputs, Mapping | tuple):
        return inputs
    keys = list(inputs) if isinstance(inputs, Mapping) else []
    if key in keys:
        return inputs[key]
    raise JobError(
        f"Received samples with the keys {', '.join(map(str, keys)) or '(none)'}; "
        f"expected {'one feature: pass select' if key is None else f'the key {key}'}."
    )


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
    except _EXPECTED as error:
        if isinstance(error, JobError):
            raise
        text = " ".join(describe(error)[0].split())
        raise JobError(f"Cannot adapt{name}: {text}") from error
