"""Recompute the activations inside of a layer in the backward pass.

Without it, the tensors between the operations of a layer stay in memory from the
forward to the backward pass. A layer passed to `remat` keeps its inputs alone, and
computes the rest again when the gradients of its outputs are known:

    first pass    outputs = call(inputs, state), without a record for gradients;
                  the new state is assigned to the variables
    second pass   after the gradients of the outputs: call(inputs, state) again, with
                  the same state, and its gradients; the new state is dropped

The state is what the layer's variables held before the first pass, such as the seeds of
dropout and the moving statistics of batch normalization. Both passes read it from a
`keras.StatelessScope`. So the second pass draws the same masks, and each variable is
updated once. Weights of `parallel.fully_shard` are gathered in each of the two passes.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state, masking
from tensorflow.python.eager import record

from hvdtrain.keras.seams import replace
from hvdtrain.parallel import mappings
from hvdtrain.parallel.gathering import (
    FullyShardedVariable,
    find_sharded,
    gather,
    reading,
    shard_value,
)

_MARK = "_hvdtrain_remat"
# Operations that TensorFlow calls stateful and that the second pass may repeat.
_REPEATABLE = ("ReadVariableOp", "VarHandleOp", "Assert")
# Attributes in which Keras keeps, during a call, `training` and the dtype of autocast.
_CALL_CONTEXT, _AUTOCAST = "current_call_ctx", "autocast_scope"

_SMALLER = "Call parallel.remat for a smaller layer that does not."

# A variable and a value of it.
_State: TypeAlias = tuple[keras.Variable, tf.Tensor]


def remat(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Make a layer recompute its activations in the backward pass; return the layer.

        x = parallel.remat(keras.Sequential([...]))(x)

    Memory is saved if the layer consists of several operations, such as a block of a
    deep model. A step takes longer by one forward pass of the layer. The results equal
    those without `remat`, bit for bit, with dropout and batch normalization, except
    where TensorFlow's graph optimizer rewrites the two graphs differently.

    It changes this object: config, files and clones of the layer are without it.

    Args:
        layer: a Keras layer or model that is a part of a model. Layers inside of it
            for which `remat` is called, too, are recomputed with it, once.

    Raises:
        ValueError: in the first step, if a second pass could not repeat the first: for
            random numbers without a seed of the layer, variables of other layers,
            collectives but those of dense and attention layers on a mesh, sparse
            gradients.
    """
    if not is_remat(layer):
        call = functools.partial(recompute, layer, layer.call, _SMALLER, ())
        functools.update_wrapper(call, layer.call)
        replace(layer, "call", call, by=remat)
        setattr(layer, _MARK, True)
    return layer


def is_remat(layer: keras.layers.Layer) -> bool:
    """Return whether `remat` was called for the layer."""
    return getattr(layer, _MARK, False)


def recompute(
    layer: keras.layers.Layer,
    call: Callable[..., Any],
    remedy: str,
    blocks: Collection[FullyShardedVariable],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return `call(*args, **kwargs)`, which is repeated in the backward pass.

    Args:
        layer: the layer.
        call: its original method `call`, or a function with the same results.
        remedy: the end of the error where it cannot be repeated.
        blocks: weights of which `call` computes with this rank's block.
    """
    # In a stateless scope, Keras infers shapes, or a layer outside is in a pass.
    if backend.in_stateless_scope():
        return call(*args, **kwargs)
    recomputation = _Recomputation(layer, call, remedy, (args, kwargs), blocks)
    outputs, scope = recomputation.run_first_pass()
    recomputation.check_assigned(scope)
    results = recomputation.attach_gradient(_differentiable(outputs, scope))
    for variable, value in scope.assigned.values():
        variable.assign(value)
    for _ in scope.losses:
        layer.add_loss(results.pop())
    return _substitute(outputs, results, _has_gradient)


class _Pass(keras.StatelessScope):
    """One pass: reads the given values of variables, and collects the new ones."""

    def __init__(self, state: Sequence[_State]) -> None:
        # Else Keras casts the values to the dtype of the computation.
        with _keras_attributes({_AUTOCAST: None}):
            super().__init__(state, collect_losses=True)
        # By the identity of the variable.
        self.assigned: dict[int, _State] = {}

    def add_update(self, update: _State) -> None:
        super().add_update(update)
        self.assigned[id(update[0])] = update


class _Recomputation:
    """The two passes of one call of a layer.

    Args:
        arguments: the positional and keyword arguments of the call.
        blocks: weights of which the call computes with this rank's block.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        call: Callable[..., Any],
        remedy: str,
        arguments: tuple[tuple, dict[str, Any]],
        blocks: Collection[FullyShardedVariable],
    ) -> None:
        self._layer = layer
        self._call = call
        self._remedy = remedy
        self._arguments = arguments
        self._blocks = blocks
        # The values of fully sharded weights are gathered, those of others given.
        self._sharded = find_sharded(layer.variables)
        sharded = {*map(id, self._sharded)}
        self._stated = [v for v in layer.variables if id(v) not in sharded]
        self._variables = [*self._stated, *self._sharded]
        # Layers inside change the context of this call: the second pass needs a copy.
        self._context = {
            _CALL_CONTEXT: copy.copy(global_state.get_global_attribute(_CALL_CONTEXT)),
            _AUTOCAST: global_state.get_global_attribute(_AUTOCAST),
        }
        self._exchanged: list[tf.Tensor] = []
        # All that a pass depends on: tensors in the arguments, values of variables.
        self._sources = [x for x in tf.nest.flatten(arguments) if tf.is_tensor(x)]
        self._check_dense(self._sources)
        with _keras_attributes({_AUTOCAST: None}):
            self._sources += [tf.convert_to_tensor(v.value) for v in self._stated]
        self._sources += map(shard_value, self._sharded)
        self._is_watched = self._find_watched()

    def run_first_pass(self) -> tuple[Any, _Pass]:
        """Return the outputs, and the scope that has the new values of variables."""
        # A tape that is active records no operation without a differentiable input.
        sources = [_keep_mask(x, tf.stop_gradient(x)) for x in self._sources]
        # Else TensorFlow would gather the weights of all layers at once.
        inputs = [
            x for x in sources[: self._argument_count] if tf.is_symbolic_tensor(x)
        ]
        with tf.control_dependencies(inputs):
            full = self._gather(sources)
        with mappings.record(self._exchanged):
            outputs, scope = self._run(sources, full)
        self._check_dense(x for x in tf.nest.flatten(outputs) if tf.is_tensor(x))
        if len(self._layer.variables) > len(self._variables):
            self._refuse("creates variables in its call")
        # Gradients would be lost: the second pass computes those of the sources alone.
        if record.should_record_backprop(_differentiable(outputs, scope)):
            self._refuse(
                "depends on a weight that it does not have, or on a tensor that is not "
                "among its arguments"
            )
        return outputs, scope

    @property
    def _argument_count(self) -> int:
        return len(self._sources) - len(self._variables)

    def _gather(self, sources: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        shards = sources[len(sources) - len(self._sharded) :]
        return gather(self._sharded, shards, blocks=self._blocks)

    def _run(
        self, sources: Sequence[tf.Tensor], full: Sequence[tf.Tensor]
    ) -> tuple[Any, _Pass]:
        count = self._argument_count
        args, kwargs = _substitute(self._arguments, sources[:count], tf.is_tensor)
        values = sources[count : count + len(self._stated)]
        state = list(zip(self._stated, values, strict=True))
        with reading(self._sharded, full), _Pass(state) as scope:
            return self._call(*args, **kwargs), scope

    def attach_gradient(self, results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return tensors equal to `results`, whose gradient runs the second pass."""

        @tf.custom_gradient
        def attach(*sources: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
                return self._run_second_pass(sources, upstream)

            return [tf.identity(result) for result in results], gradient

        return list(attach(*self._sources)) if results else []

    def _run_second_pass(
        self, sources: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]
    ) -> list[tf.Tensor | None]:
        upstream = [tf.convert_to_tensor(gradient) for gradient in upstream]
        # Without these dependencies, TensorFlow would start this pass in the forward
        # pass, or merge its operations with the equal ones of the first pass: no
        # memory would be saved.
        with (
            tf.GradientTape(watch_accessed_variables=False) as tape,
            tf.control_dependencies(upstream),
        ):
            pairs = zip(self._sources, sources, strict=True)
            sources = [_keep_mask(old, tf.identity(new)) for old, new in pairs]
            watched = [*itertools.compress(sources, self._is_watched)]
            tape.watch(watched)
            results = self._repeat(sources, self._gather(sources))
        gradients = tape.gradient(results, watched, output_gradients=upstream)
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            self._refuse("has sparse gradients, of an embedding or of tf.gather")
        found = iter(gradients)
        return [next(found) if is_watched else None for is_watched in self._is_watched]

    def _repeat(
        self, sources: Sequence[tf.Tensor], full: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        with (
            _keras_attributes(self._context),
            mappings.replay(self._exchanged),
            self._refusing_side_effects(),
        ):
            return _differentiable(*self._run(sources, full))

    def _find_watched(self) -> list[bool]:
        """Return which sources need gradients; the samples, for example, do not."""
        trainable = {id(variable) for variable in self._layer.trainable_variables}
        variables = [id(variable) in trainable for variable in self._variables]
        arguments = self._sources[: self._argument_count]
        is_candidate = [*map(_has_gradient, arguments), *variables]
        pairs = zip(is_candidate, self._sources, strict=True)
        is_watched = [ok and record.should_record_backprop([x]) for ok, x in pairs]
        # Without a tape, tf.gradients may follow, of which nothing shows here.
        return is_watched if any(is_watched) else is_candidate

    def check_assigned(self, scope: _Pass) -> None:
        """Raise a ValueError if the first pass assigned variables of other layers."""
        own = set(map(id, self._variables))
        for variable, _ in scope.assigned.values():
            if id(variable) not in own:
                self._refuse(
                    f"assigns {variable.path!r}, a variable that it does not have. "
                    "Random functions need a keras.random.SeedGenerator that is an "
                    "attribute of the layer"
                )

    @contextlib.contextmanager
    def _refusing_side_effects(self) -> Iterator[None]:
        """Raise a ValueError if stateful operations are traced in the block."""
        if tf.executing_eagerly():
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        yield
        for operation in graph.get_operations()[before:]:
            if operation.op_def.is_stateful and operation.type not in _REPEATABLE:
                self._refuse(
                    f"contains the stateful operation {operation.type}: random numbers "
                    "of TensorFlow, a collective or another side effect"
                )

    def _check_dense(self, tensors: Iterable[tf.Tensor]) -> None:
        for tensor in tensors:
            if not isinstance(tensor, tf.Tensor):
                self._refuse(f"takes or returns a {type(tensor).__name__}")

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(
            "The backward pass cannot repeat the call of the "
            f"{type(self._layer).__name__} {self._layer.name!r}, which {reason}. "
            f"{self._remedy}"
        )


def _differentiable(outputs: Any, scope: _Pass) -> list[tf.Tensor]:
    """Return the outputs that have gradients, and the losses in reverse order."""
    return [*filter(_has_gradient, tf.nest.flatten(outputs)), *reversed(scope.losses)]


def _has_gradient(x: object) -> bool:
    return isinstance(x, tf.Tensor) and (x.dtype.is_floating or x.dtype.is_complex)


def _substitute(
    nest: Any, tensors: Sequence[tf.Tensor], condition: Callable[[object], bool]
) -> Any:
    """Return a nest with `tensors` in place of the leaves that fulfil a condition."""
    found = iter(tensors)
    leaves = [
        _keep_mask(leaf, next(found)) if condition(leaf) else leaf
        for leaf in tf.nest.flatten(nest)
    ]
    return tf.nest.pack_sequence_as(nest, leaves)


def _keep_mask(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    mask = masking.get_keras_mask(old)
    if mask is not None:
        masking.set_keras_mask(new, mask)
    return new


@contextlib.contextmanager
def _keras_attributes(values: Mapping[str, object]) -> Iterator[None]:
    """Set attributes of Keras' global state in the block."""
    before = {name: global_state.get_global_attribute(name) for name in values}
    try:
        for name, value in values.items():
            global_state.set_global_attribute(name, value)
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)
