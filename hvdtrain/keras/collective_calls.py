"""Methods of `keras.Model` that all ranks call together where a model is divided.

`fit`, `evaluate` and `predict` of a divided model contain collectives, and `save` and
`save_weights` gather its weights. Called on one rank alone they would wait for the
others without end. So all ranks first compare what they call, within a limit of time.
"""

import contextlib
import functools
import queue
import threading
import warnings
from typing import NamedTuple

import keras
import tensorflow as tf
from keras.src.models import cloning

from hvdtrain.collectives import threads, transport
from hvdtrain.collectives.environment import stall_limits
from hvdtrain.collectives.objects import (
    allgather_object,
    group_by_value,
    name_values,
)
from hvdtrain.collectives.process_sets import global_process_set, needs_communication
from hvdtrain.keras import full_saving
from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import find_optimizers, get_hook
from hvdtrain.sharding.layer_checks import check_shards
from hvdtrain.sharding.shards import get_sharding, is_split_over_ranks

_MARK = "_hvdtrain_collective"
_RUNS = ("fit", "evaluate", "predict")
_SAVES = ("save", "save_weights")


class _Call(NamedTuple):
    method: str
    saving: tuple


def install():
    """Replaces these methods of `keras.Model`; of models that are whole, none acts.

    For the class: a layer or an optimizer that is divided has no reference to the
    models that it becomes part of.
    """
    if hasattr(keras.Model.save, _MARK):
        return
    for names, wrap in ((_RUNS, _run), (_SAVES, _save), (("export",), _export)):
        for name in names:
            method = wrap(getattr(keras.Model, name))
            setattr(method, _MARK, True)
            replace(keras.Model, name, method, by=install)
    full_saving.install()
    # The default of keras.models.clone_model makes layers from their configs, which
    # are those of the dense twins.
    wrap_layers = functools.partial(_wrap_clone_function, cloning._wrap_clone_function)
    replace(cloning, "_wrap_clone_function", wrap_layers, by=install)


def _wrap_clone_function(wrap, clone_function=None, **options):
    return wrap(clone_function or _clone_layer, **options)


def _clone_layer(layer):
    if hasattr(layer, "clone_sharded"):
        return layer.clone_sharded()
    # An operation such as x + y has none.
    if is_split_over_ranks(getattr(layer, "variables", ())):
        raise ValueError(
            f"keras.models.clone_model makes {layer.name!r}, a {type(layer).__name__} "
            "that contains divided layers, from its config, which is dense. Build the "
            "model again, or pass a clone_function."
        )
    return layer.__class__.from_config(layer.get_config())


def is_saved_together(model: keras.Model) -> bool:
    """Whether all ranks take part when `model` is saved; rank 0 writes the file."""
    is_shared = is_split_over_ranks(_saved_variables(model)) or _is_pipeline(model)
    return is_shared and needs_communication(global_process_set)


def save_by_rank_0(model, save):
    """Calls `save(model)` on rank 0. All ranks call this.

    Where the model is divided over ranks, the others take part. Of a pipeline, `save`
    is called with the dense model.
    """
    divided = [v for v in _saved_variables(model) if get_sharding(v)]
    if _is_pipeline(model):
        model, divided = model.gather_full(), []
    elif not divided:
        if global_process_set.rank() == 0:
            save(model)
        return
    full_saving.save_together(divided, lambda: save(model))


def _is_pipeline(model):
    return hasattr(model, "gather_full")


def _is_on_splitting_mesh(model: keras.Model) -> bool:
    hooks = [get_hook(optimizer) for optimizer in find_optimizers(model)]
    meshes = [hook.mesh for hook in hooks if hook and hook.mesh]
    return any(mesh.shape.splits_model for mesh in meshes)


def _run(method):
    @functools.wraps(method)
    def run(self, *args, **kwargs):
        hook = get_hook(getattr(self, "optimizer", None))
        callbacks = _list_of(kwargs.get("callbacks"))
        if hook and hook.sharded_state:
            _check_none_swaps_averages(callbacks)
        if hook and hook.mesh and hook.mesh.model.size > 1:
            compare_along_model(self)
        if _needs_all_ranks(self.variables):
            if method.__name__ == "fit" and not hook:
                raise ValueError(
                    "The model is divided over ranks, and was compiled with a plain "
                    "optimizer, which does not take its parts into account. Pass "
                    "hvd.DistributedOptimizer(optimizer), with the mesh of its layers, "
                    "to compile."
                )
            check_shards(self)
            _check_none_restores(callbacks)
            saving = _names(callbacks, keras.callbacks.ModelCheckpoint)
            check_called_alike(method.__name__, saving)
        return method(self, *args, **kwargs)

    return run


def _save(method):
    @functools.wraps(method)
    def save(self, *args, **kwargs):
        is_together = is_saved_together(self)
        if full_saving.is_saving() or not (
            is_together or _is_pipeline(self) or _is_on_splitting_mesh(self)
        ):
            return method(self, *args, **kwargs)
        if is_together:
            _check_format(str(args[0] if args else kwargs.get("filepath", "")))
            check_called_alike(method.__name__)
        elif global_process_set.rank():
            warnings.warn(
                f"model.{method.__name__} writes no file on rank "
                f"{global_process_set.rank()}, and does not wait for that of rank 0. "
                "The model has no divided layers, and is trained on a mesh with model "
                "or pipeline above 1, where rank 0 alone writes files.",
                stacklevel=2,
            )
        # On such a mesh all ranks save, divided or not: they must not write one file.
        return save_by_rank_0(self, lambda whole: method(whole, *args, **kwargs))

    return save


def _check_format(path):
    if path.endswith((".h5", ".hdf5")) and not path.endswith(".weights.h5"):
        raise ValueError(
            "A model that is divided over ranks is saved as a .keras file, or by "
            f"save_weights as a .weights.h5 file. Received: {path}"
        )


def _export(method):
    @functools.wraps(method)
    def export(self, *args, **kwargs):
        if _needs_all_ranks(self.variables):
            raise ValueError(
                "The model is divided over ranks, and an export of it could only run "
                "in a job. Save it by model.save, which writes the dense model; load "
                "that in one process by keras.models.load_model, and export it there."
            )
        return method(self, *args, **kwargs)

    return export


def _saved_variables(model):
    optimizers = [each for each in find_optimizers(model) if each is not None]
    for optimizer in optimizers:
        full_saving.note_slots(optimizer)
    return [*model.variables, *(v for each in optimizers for v in each.variables)]


def _needs_all_ranks(variables):
    return is_split_over_ranks(variables) and needs_communication(global_process_set)


def _list_of(callbacks):
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return keras.tree.flatten(callbacks)


def _check_none_swaps_averages(callbacks):
    if _names(callbacks, keras.callbacks.SwapEMAWeights):
        raise ValueError(
            "SwapEMAWeights exchanges weights and their averages, and with shard_state "
            "each rank has only its part of the averages. Use shard_state=False, or "
            "leave out the callback: fit assigns the averages to the weights when it "
            "ends."
        )


def _check_none_restores(callbacks):
    if _names(callbacks, keras.callbacks.BackupAndRestore):
        raise ValueError(
            "The model is divided over ranks, which save it together, and each rank's "
            "BackupAndRestore would delete the others' directory. Use ModelCheckpoint, "
            "or training.train_and_evaluate, which continues an interrupted job."
        )


def _names(callbacks, kind):
    return [type(each).__name__ for each in callbacks if isinstance(each, kind)]


def check_called_alike(method, saving=()):
    """Raises an error unless all ranks call the same method of a divided model.

    Args:
        method: its name.
        saving: names of callbacks that save the model.

    Raises:
        RuntimeError: also if the other ranks call none within the time after which
            Horovod ends a stalled job.
    """
    groups = group_by_value(_gather_calls(_Call(method, tuple(saving))))
    if len(groups) > 1:
        raise RuntimeError(
            "The model is divided over ranks, which call its methods together, with "
            "the same callbacks that save it. Received: "
            f"{name_values(groups, _text)}."
        )


def _text(call):
    # The collectives of a job are matched by their order: this may be another one.
    if not isinstance(call, _Call):
        return "another collective"
    return " with ".join([f"model.{call.method}", *call.saving])


def _gather_calls(mine):
    """Returns what all ranks call; it waits as long as Horovod does in a stall."""
    found, caller = queue.Queue(), threads.current()

    def gather():
        threads.act_for(caller)
        # The other ranks may have ended meanwhile.
        with contextlib.suppress(tf.errors.OpError):
            found.put(allgather_object(mine, name="CollectiveCall"))

    # A daemon: the exit of Python does not wait for ranks that never come.
    thread = threading.Thread(target=gather, name="CollectiveCall", daemon=True)
    thread.start()
    # 0 is no limit.
    warn_seconds, end_seconds = (n or threading.TIMEOUT_MAX for n in stall_limits())
    text = (
        f"model.{mine.method} was called on rank {global_process_set.rank()}, and not "
        "on all other ranks within {:g} seconds. The model is divided over ranks: call "
        "it on all of them, also to save it; rank 0 writes the files."
    )
    thread.join(min(warn_seconds, end_seconds))
    if thread.is_alive() and warn_seconds < end_seconds:
        # Another rank may be slower, while it loads its data for example.
        warnings.warn(text.format(warn_seconds), stacklevel=4)
        thread.join(end_seconds - warn_seconds)
    if thread.is_alive():
        raise RuntimeError(text.format(end_seconds))
    if found.empty():
        raise RuntimeError(
            f"model.{mine.method} was called on rank {global_process_set.rank()}, and "
            "other ranks have ended. The model is divided over ranks: call it on all "
            "of them, also to save it; rank 0 writes the files."
        )
    return found.get()


_COMPARES = "_hvdtrain_compares_samples"
# Integers below it are exact in float32, and their sum with zeros is.
_MODULUS = 1 << 20


def compare_along_model(model: keras.Model) -> None:
    """Makes the steps of a model fail where ranks along `model` got different samples.

    The ranks of a model group are one replica. Of each batch in training, and in the
    evaluation of a divided model, they compare a fingerprint of the first sample.
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


def _compare_and_test(model, step, data):
    # One rank alone may evaluate a model of which nothing is divided.
    if not is_split_over_ranks(model.variables):
        return step(data)
    return _compare_and_step(model, step, data)


def _compare_and_step(model, step, data):
    # The optimizer of now: a model may be compiled again.
    hook = get_hook(getattr(model, "optimizer", None))
    axis = hook.mesh.model if hook and hook.mesh else None
    if axis and needs_communication(axis.process_set):
        numbers = fingerprints(data, axis)
        check_equal(transport.combine(numbers, axis.process_set, name="Samples"))
    return step(data)


def fingerprints(data: object, axis: object) -> tf.Tensor:
    """Returns a vector whose sum over ranks has the fingerprint of each of them.

    The fingerprint is a function of the bits of the first sample: it does not depend
    on the order of a sum, which may differ by rank.

    Args:
        data: nest of the tensors of a batch; may have None in it.
        axis: the `Axis` of a mesh along which the ranks are compared.
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
    """Raises an InvalidArgumentError on each rank if these fingerprints differ."""
    tf.debugging.assert_equal(
        numbers,
        tf.fill(tf.shape(numbers), numbers[0]),
        "The ranks of one replica of a model received different samples. Give all of "
        "them the same data in the same order: read by mesh.data.index and "
        "mesh.data.size in place of hvd.rank() and hvd.size(), and pass shuffle=False "
        "to fit, or call keras.utils.set_random_seed with the same seed on each rank.",
    )
