"""Methods of `keras.Model` that all ranks call together where a model is sharded.

`fit`, `evaluate` and `predict` of a sharded model contain collectives, and `save` and
`save_weights` gather its weights. A call on one rank alone would block for ever. So all
ranks first compare what they call, within a limit of time.
"""

import contextlib
import functools
import queue
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf
from keras.src.models import cloning

from hvdtrain.collectives import threads, transport
from hvdtrain.collectives.dtypes import local_shard
from hvdtrain.collectives.objects import (
    allgather_object,
    group_by_value,
    name_values,
)
from hvdtrain.collectives.process_sets import global_process_set, needs_communication
from hvdtrain.environment import stall_limits
from hvdtrain.keras import sharded_saving
from hvdtrain.keras.replication import get_hook
from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import find_optimizers
from hvdtrain.sharding.layer_checks import check_shards
from hvdtrain.sharding.shards import get_sharding, is_split_over_ranks

if TYPE_CHECKING:
    # A floor above.
    from hvdtrain.parallel.mesh import Axis

# A method of `keras.Model`, or what replaces it.
Method: TypeAlias = Callable[..., Any]
Data: TypeAlias = Any
Step: TypeAlias = Callable[[Data], Any]

_MARK = "_hvdtrain_collective"
_RUNS = ("fit", "evaluate", "predict")
_SAVES = ("save", "save_weights")


class _Call(NamedTuple):
    method: str
    saving: tuple[str, ...]

    def __str__(self) -> str:
        return " with ".join([f"model.{self.method}", *self.saving])


def install() -> None:
    """Replace these methods of `keras.Model`; they act on sharded models only.

    The methods of the class are replaced: a sharded layer or optimizer has no reference
    to the models that it becomes part of.
    """
    if hasattr(keras.Model.save, _MARK):
        return
    for names, wrap in (
        (_RUNS, _run),
        (_SAVES, _save),
        (("load_weights",), _load),
        (("export",), _export),
    ):
        for name in names:
            method = wrap(getattr(keras.Model, name))
            setattr(method, _MARK, True)
            replace(keras.Model, name, method, by=install)
    sharded_saving.install()
    # By default keras.models.clone_model makes layers from their configs, and the
    # config of a sharded layer makes the full layer.
    wrap_layers = functools.partial(_wrap_clone_function, cloning._wrap_clone_function)
    # Its signature is Keras' own, which test_seams.py reads.
    functools.update_wrapper(wrap_layers, cloning._wrap_clone_function)
    replace(cloning, "_wrap_clone_function", wrap_layers, by=install)


def _wrap_clone_function(
    wrap: Callable[..., Callable],
    clone_function: Callable[[keras.layers.Layer], keras.layers.Layer] | None = None,
    **options: Any,
) -> Callable:
    return wrap(clone_function or _clone_layer, **options)


def _clone_layer(layer: keras.layers.Layer) -> keras.layers.Layer:
    if hasattr(layer, "clone_sharded"):
        return layer.clone_sharded()
    # An operation such as x + y has no variables.
    if is_split_over_ranks(getattr(layer, "variables", ())):
        raise ValueError(
            f"keras.models.clone_model makes {layer.name!r}, a {type(layer).__name__} "
            "that contains sharded layers, from its config, which makes full layers. "
            "Build the model again, or pass a clone_function."
        )
    return layer.__class__.from_config(layer.get_config())


def is_saved_together(model: keras.Model) -> bool:
    """Return whether all ranks take part in saving `model`; rank 0 writes the file."""
    is_shared = is_split_over_ranks(_saved_variables(model)) or _is_pipeline(model)
    return is_shared and needs_communication(global_process_set)


def is_saved_by_rank_0(model: keras.Model) -> bool:
    """Return whether rank 0 alone writes a file, although all ranks save `model`."""
    return (
        is_saved_together(model) or _is_pipeline(model) or _is_on_splitting_mesh(model)
    )


def save_by_rank_0(model: keras.Model, save: Callable[[keras.Model], None]) -> None:
    """Call `save(model)` on rank 0. All ranks call this.

    The other ranks send their shards. Of a pipeline, `save` is called with the full
    model.
    """
    sharded = [v for v in _saved_variables(model) if get_sharding(v)]
    if _is_pipeline(model):
        model, sharded = model.gather_full(), []
    elif not sharded:
        if global_process_set.rank() == 0:
            save(model)
        return
    sharded_saving.save_together(sharded, lambda: save(model))


def _is_pipeline(model: keras.Model) -> bool:
    return hasattr(model, "gather_full")


def _is_on_splitting_mesh(model: keras.Model) -> bool:
    hooks = [get_hook(optimizer) for optimizer in find_optimizers(model)]
    meshes = [hook.mesh for hook in hooks if hook and hook.mesh]
    return any(mesh.shape.splits_model for mesh in meshes)


def _run(method: Method) -> Method:
    @functools.wraps(method)
    def run(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        hook = get_hook(getattr(self, "optimizer", None))
        callbacks = _flatten(kwargs.get("callbacks"))
        if hook and hook.sharded_state:
            _check_none_swaps_averages(callbacks, "shard_state")
        if any(local_shard(variable) is not variable for variable in self.variables):
            _check_none_swaps_averages(callbacks, "sharded weights")
        if hook and hook.mesh and hook.mesh.model.size > 1:
            compare_along_model(self)
        if _needs_all_ranks(self.variables):
            if method.__name__ == "fit" and not hook:
                raise ValueError(
                    "The model is sharded over ranks, and was compiled with a plain "
                    "optimizer, which takes a shard for the full weight. Pass "
                    "hvd.DistributedOptimizer(optimizer), with the mesh of its layers, "
                    "to compile."
                )
            check_shards(self)
            _check_none_restores(callbacks)
            saving = _class_names(callbacks, keras.callbacks.ModelCheckpoint)
            check_called_alike(method.__name__, saving)
        return method(self, *args, **kwargs)

    return run


def _save(method: Method) -> Method:
    @functools.wraps(method)
    def save(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        is_together = is_saved_together(self)
        if sharded_saving.is_saving() or not is_saved_by_rank_0(self):
            return method(self, *args, **kwargs)
        if is_together:
            _check_format(str(args[0] if args else kwargs.get("filepath", "")))
            check_called_alike(method.__name__)
        elif global_process_set.rank():
            warnings.warn(
                f"model.{method.__name__} writes no file on rank "
                f"{global_process_set.rank()}, and does not wait for rank 0 to write "
                "it. The model has no sharded layers, and is trained on a mesh with "
                "model or pipeline above 1, where rank 0 alone writes files.",
                stacklevel=2,
            )
        # On such a mesh all ranks call this, also for a model that is not sharded: the
        # ranks must not write to one file.
        return save_by_rank_0(self, lambda full: method(full, *args, **kwargs))

    return save


def _load(method: Method) -> Method:
    @functools.wraps(method)
    def load(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        # One rank alone would change its shards of the weights.
        if _needs_all_ranks(self.variables):
            check_called_alike(method.__name__)
        return method(self, *args, **kwargs)

    return load


def _check_format(path: str) -> None:
    if path.endswith((".h5", ".hdf5")) and not path.endswith(".weights.h5"):
        raise ValueError(
            "A model that is sharded over ranks is saved as a .keras file, or by "
            f"save_weights as a .weights.h5 file. Received: {path}"
        )


def _export(method: Method) -> Method:
    @functools.wraps(method)
    def export(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if _needs_all_ranks(self.variables):
            raise ValueError(
                "The model is sharded over ranks, and an export of it could only run "
                "in a job. Save it by model.save, which writes the full model; load "
                "that in one process by keras.models.load_model, and export it there."
            )
        return method(self, *args, **kwargs)

    return export


def _saved_variables(model: keras.Model) -> list[keras.Variable]:
    variables = [*model.variables]
    for optimizer in find_optimizers(model):
        sharded_saving.mark_sharded_slots(optimizer)
        variables += optimizer.variables
    return variables


def _needs_all_ranks(variables: Sequence[keras.Variable]) -> bool:
    return is_split_over_ranks(variables) and needs_communication(global_process_set)


def _flatten(callbacks: Any) -> list[keras.callbacks.Callback]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return keras.tree.flatten(callbacks)


def _check_none_swaps_averages(
    callbacks: Iterable[keras.callbacks.Callback], option: str
) -> None:
    if _class_names(callbacks, keras.callbacks.SwapEMAWeights):
        raise ValueError(
            f"SwapEMAWeights exchanges weights and their averages, and with {option} "
            "each rank has only its shards of the averages. Leave out the callback: "
            "fit assigns the averages to the weights when it ends."
        )


def _check_none_restores(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    if _class_names(callbacks, keras.callbacks.BackupAndRestore):
        raise ValueError(
            "The model is sharded over ranks, which save it together, and each rank's "
            "BackupAndRestore would delete the others' directory. Use ModelCheckpoint, "
            "or training.train_and_evaluate, which continues an interrupted job."
        )


def _class_names(callbacks: Iterable[keras.callbacks.Callback], cls: type) -> list[str]:
    return [type(c).__name__ for c in callbacks if isinstance(c, cls)]


def check_called_alike(method: str, saving: Iterable[str] = ()) -> None:
    """Raise a RuntimeError unless all ranks call one `method` of a sharded model.

    Also if the other ranks call none within the time after which Horovod ends a stalled
    job. `saving` are the names of the classes of callbacks that save the model.
    """
    groups = group_by_value(_gather_calls(_Call(method, tuple(saving))))
    if len(groups) > 1:
        raise RuntimeError(
            "All ranks must call the same method of a sharded model, with the same "
            "callbacks that save it. Received: "
            f"{name_values(groups, _describe)}."
        )


def _describe(call: object) -> str:
    # The collectives of a job are matched by their order: another rank may have
    # contributed to a different one.
    return str(call) if isinstance(call, _Call) else "another collective"


def _gather_calls(call: _Call) -> list[Any]:
    """Return the calls of all ranks; wait as long as Horovod does in a stall."""
    results: queue.Queue[list[Any]] = queue.Queue()
    caller = threads.current()

    def gather() -> None:
        threads.act_for(caller)
        # The other ranks may have ended meanwhile.
        with contextlib.suppress(tf.errors.OpError):
            results.put(allgather_object(call, name="CollectiveCall"))

    # A daemon: the exit of Python does not wait for ranks that never come.
    thread = threading.Thread(target=gather, name="CollectiveCall", daemon=True)
    thread.start()
    # 0 is no limit.
    warn_seconds, end_seconds = (n or threading.TIMEOUT_MAX for n in stall_limits())
    text = (
        f"model.{call.method} was called on rank {global_process_set.rank()}, and not "
        "on all other ranks within {:g} seconds. The model is sharded over ranks: call "
        "it on all of them, also to save it; rank 0 writes the files."
    )
    thread.join(min(warn_seconds, end_seconds))
    if thread.is_alive() and warn_seconds < end_seconds:
        # Another rank may be slower, while it loads its data for example.
        warnings.warn(text.format(warn_seconds), stacklevel=4)
        thread.join(end_seconds - warn_seconds)
    if thread.is_alive():
        raise RuntimeError(text.format(end_seconds))
    if results.empty():
        raise RuntimeError(
            f"model.{call.method} was called on rank {global_process_set.rank()}, and "
            "other ranks have ended. The model is sharded over ranks: call it on all "
            "of them, also to save it; rank 0 writes the files."
        )
    return results.get()


_COMPARES = "_hvdtrain_compares_samples"
# Integers below it are exact in float32, and their sum with zeros is.
_MODULUS = 1 << 20


def compare_along_model(model: keras.Model) -> None:
    """Make the steps of a model fail where ranks along `model` got different samples.

    The ranks of a model group are one replica. In training, and in the evaluation of a
    sharded model, they compare a fingerprint of the first sample of each batch.
    """
    if getattr(model, _COMPARES, False):
        return
    setattr(model, _COMPARES, True)
    for name, compare in (
        ("train_step", _compare_and_step),
        ("test_step", _compare_and_test),
    ):
        step = functools.partial(compare, model, getattr(model, name))
        replace(model, name, step, by=compare_along_model)


def _compare_and_test(model: keras.Model, step: Step, data: Data) -> Any:
    # One rank alone may evaluate a model without sharded variables.
    if not is_split_over_ranks(model.variables):
        return step(data)
    return _compare_and_step(model, step, data)


def _compare_and_step(model: keras.Model, step: Step, data: Data) -> Any:
    # The present optimizer: a model may be compiled again.
    hook = get_hook(getattr(model, "optimizer", None))
    axis = hook.mesh.model if hook and hook.mesh else None
    if axis and needs_communication(axis.process_set):
        numbers = fingerprints(data, axis)
        check_equal(transport.combine(numbers, axis.process_set, name="Samples"))
    return step(data)


def fingerprints(data: Data, axis: "Axis") -> tf.Tensor:
    """Return a vector whose sum over ranks has the fingerprint of each of them.

    The fingerprint is a function of the bits of the first sample: it does not depend
    on the order of a sum, which may differ by rank. `data` is a nest of the tensors of
    a batch, and may have None in it.
    """
    total = tf.zeros([], tf.int32)
    for tensor in keras.tree.flatten(data):
        if tensor is None or isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
            continue
        if tf.as_dtype(tensor.dtype) != tf.string and len(tensor.shape):
            row = tf.cast(tensor[:1], tf.float32)
            total += tf.reduce_sum(tf.bitcast(row, tf.int32))
    return tf.one_hot(axis.index, axis.size) * tf.cast(total % _MODULUS, tf.float32)


def check_equal(numbers: tf.Tensor) -> None:
    """Raise an InvalidArgumentError on each rank if these fingerprints differ."""
    tf.debugging.assert_equal(
        numbers,
        tf.fill(tf.shape(numbers), numbers[0]),
        "The ranks of one replica of a model received different samples. Give all of "
        "them the same data in the same order: read by mesh.data.index and "
        "mesh.data.size in place of hvd.rank() and hvd.size(), and pass shuffle=False "
        "to fit, or call keras.utils.set_random_seed with the same seed on each rank.",
    )
