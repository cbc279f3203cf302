"""What the package uses and replaces in Keras beyond the public interface.

An upgrade of Keras starts here: tests/unit/test_seams.py checks each row on the Keras
that is installed, and that no module uses a private name without a row. The names
of the classes behind `keras.ops`, which are private too, are `OPERATION_CLASSES`.
"""

import pkgutil
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

OPERATION_CLASSES = "hvdtrain.sharding.layer_checks._ELEMENTWISE_OPERATIONS"


class Seam(NamedTuple):
    """A private name of Keras, or a name whose value the package replaces.

    Attributes:
        signature: the attribute; of a function with the names of its parameters but
            `self`, where "..." stands for any others, which are passed through.
        why: what it is needed for.
        replaced_by: functions and classes of hvdtrain that replace it, on an instance,
            a class or a module. The outermost is the last.
        is_ordered: whether they must replace it in this order.
        is_optional: whether instances, or versions of Keras, may lack it.
    """

    signature: str
    why: str
    replaced_by: tuple[str, ...] = ()
    is_ordered: bool = False
    is_optional: bool = False

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]


_SHARDED_STATE = "keras.sharded_state.ShardedState"
_HOOK = "keras.hook.ReductionHook"
_SKIPPING = "keras.hook.UpdateSkipping"
_DECAY = "keras.weight_decay.WeightDecay"
_RECORD = "verify.capture.record_steps"
_EVALUATION = "verify.capture.note_other_loops"
_WEIGHTS = "verify.capture.note_class_weights"
_DECISIONS = "verify.decisions.note_decisions"
_ENABLE = "distribution.enabling.enable"
_XLA = "keras.compiled_gradients.install"
_SAVING = "keras.sharded_saving.install"

# fmt: off
# `build` of the attention layers is overridden, and Keras' `call` reads what it makes.
_ATTENTION = (
    Seam("_get_common_kwargs_for_sublayer()", "Arguments of the projections."),
    *(Seam(name, "A sublayer that `build` makes, and `call` reads.",
           is_optional=name == "_gate_dense")
      for name in ("_query_dense", "_key_dense", "_value_dense", "_gate_dense",
                   "_output_dense", "_dropout_layer")),
)

# By the class or module of Keras that has the name.
SEAMS: Mapping[str, tuple[Seam, ...]] = {
    "keras.optimizers.Optimizer": (
        # A step: Keras' `apply` builds the optimizer and accumulates, then calls
        # _clip_gradients, _apply_weight_decay, _backend_update_step and
        # _update_model_variables_moving_average, once for each complete window.
        Seam("apply(grads, trainable_variables)",
             "Checks before a step, and that it has reduced its gradients; notes them.",
             replaced_by=("verify.first_gradients.note_first_gradients", _HOOK)),
        Seam("apply_gradients(grads_and_vars)", "Collects gradients in XLA.",
             replaced_by=("keras.compiled_gradients._collected",)),
        Seam("build(variables)",
             "Of the class: refuses fully sharded weights. A verification follows the "
             "optimizer; ShardedState builds slots for shards of the weights; the hook "
             "then sets their shardings.",
             replaced_by=(_RECORD, _SAVING, _SHARDED_STATE, _HOOK), is_ordered=True),
        Seam("_clip_gradients(grads)",
             "Runs between accumulation and clipping, also where nothing is clipped: "
             "gradients are reduced here.",
             replaced_by=(_HOOK,)),
        Seam("add_variable_from_reference(reference_variable, name, initializer)",
             "Accumulated gradients have the full shape, other slots the shard's.",
             replaced_by=(_SHARDED_STATE,)),
        Seam("_apply_weight_decay(variables)",
             "Decays this rank's shards, after gradients; not in a skipped update.",
             replaced_by=(_SHARDED_STATE, _DECAY, _SKIPPING), is_ordered=True),
        Seam("_backend_update_step(grads, trainable_variables, learning_rate)",
             "Updates this rank's shards; a skipped update exchanges nothing.",
             replaced_by=(_SHARDED_STATE, _SKIPPING), is_ordered=True),
        Seam("_update_model_variables_moving_average(trainable_variables)",
             "Averages this rank's shards; not after an update that is skipped.",
             replaced_by=(_SHARDED_STATE, _SKIPPING), is_ordered=True),
        Seam("_overwrite_model_variables_with_average_value(trainable_variables)",
             "Gathers the averages, of which each rank has its shards.",
             replaced_by=(_SHARDED_STATE,)),
        Seam("finalize_variable_values(var_list)", "Ends fit.", replaced_by=(_HOOK,)),
        Seam("save_own_variables(store)", "Saves full slots.", replaced_by=(_SAVING,)),
        Seam("load_own_variables(store)",
             "Takes this rank's shards of the full slots in a file.",
             replaced_by=(_SAVING,)),
        Seam("_trainable_variables", "The weights: `apply` takes the same ones."),
        Seam("_trainable_variables_indices", "The place of the slots of a weight."),
        Seam("_var_key(variable)", "The key of its shard.", replaced_by=(_SAVING,)),
        Seam("_untrack_variable(variable)", "Removes full slots, for those of shards."),
        Seam("_exclude_from_weight_decay",
             "Keys of weights that do not decay, to which their shards are added.",
             is_optional=True),
        Seam("_iterations", "Counts micro-steps; the public one counts windows."),
        Seam("_learning_rate", "The variable or schedule; the public name calls it."),
        Seam("_accumulated_gradients", "Sums of a window, which differ by rank."),
        Seam("_model_variables_moving_average",
             "The shards of the averages of the weights (`use_ema`)."),
        Seam("_variables", "All variables: not a list of slots of one kind."),
    ),
    "keras.optimizers.RMSprop": (
        Seam("_momentums",
             "Velocities that contain the learning rate, and are scaled with it."),
    ),
    "keras.optimizers.ScheduleFreeAdamW": (
        Seam("_momentums",
             "Slots that start as copies of the weights, which must be equal before.",
             is_optional=True),
    ),
    "keras.optimizers.LossScaleOptimizer": (
        Seam("check_finite(grads)",
             "All ranks skip a step that overflows on one: else the others block.",
             replaced_by=("keras.hook.share_overflow",)),
    ),
    "keras.Model": (
        *(Seam(f"{name}(callbacks, ...)",
               "Contains collectives where the model is sharded: all ranks call it.",
               replaced_by=("keras.sharded_models.install", *others))
          for name, *others in (
              ("fit", _ENABLE, _WEIGHTS, _DECISIONS),
              ("evaluate", _EVALUATION, _ENABLE),
              ("predict", _EVALUATION, _ENABLE))),
        *(Seam(f"{name}(filepath, ...)",
               "All ranks call it where the model is sharded, and gather or load.",
               replaced_by=("keras.sharded_models.install",))
          for name in ("save", "save_weights", "load_weights")),
        Seam("export(filepath, ...)",
             "Raises an error: a graph with collectives runs in no other process.",
             replaced_by=("keras.sharded_models.install",)),
        # Skipping and the comparison of samples may be in either order.
        Seam("train_step(data)",
             "Of the class: computes gradients in XLA. Leaves out losses that are not "
             "finite; compares samples along the axis `model`; runs on several devices "
             "in the benchmark.",
             replaced_by=(_XLA, "training.skipping.Skipping",
                          "keras.sharded_models.compare_along_model",
                          "benchmark.one_process.build",
                          "benchmark.one_process.independent_models")),
        Seam("test_step(data)", "Compares samples along the axis `model`.",
             replaced_by=("keras.sharded_models.compare_along_model",)),
        # `substitute` puts a function in place of the present one, and takes it out
        # before its first call; Keras makes another one where it is None.
        Seam("train_function(iterator)",
             "Builds the model or passes over batches before the first step. `compile` "
             "removes it, which a training refuses. Warns of a user's train_step.",
             replaced_by=(_XLA, "training.loop.train",
                          "keras.callbacks.fit_start.substitute")),
        Seam("make_train_function(force)", "Disables XLA in it.", replaced_by=(_XLA,)),
        Seam("train_on_batch(x, y, sample_weight, ...)",
             "A verification records its batches and steps, or replaces its batches; "
             "under keras.distribution its first step has the weights of rank 0.",
             replaced_by=(
                 "verify.capture.exchange_batches", _RECORD, _WEIGHTS, _ENABLE)),
        *(Seam(signature, "Under keras.distribution the samples of all ranks count.",
               replaced_by=(_ENABLE,))
          for signature in ("get_metrics_result()", "predict_step(data)")),
        *(Seam(signature, "Runs functions that were traced under this distribution.",
               replaced_by=(_ENABLE,))
          for signature in ("test_on_batch(x, y, sample_weight, ...)",
                            "predict_on_batch(x)")),
        *(Seam(signature, "Keras makes it again where it is None.")
          for signature in ("test_function(iterator)", "predict_function(data)")),
        Seam("stop_evaluating", "Ends `evaluate` after the same batch on all ranks."),
        Seam("compute_loss(x, y, y_pred, sample_weight, training)",
             "Checks regularizers and losses, which op of an optimizer may not fit.",
             replaced_by=("keras.loss_reductions.check_computed_losses",)),
        Seam("reset_metrics()", "The states before it are averaged over the ranks.",
             replaced_by=("keras.callbacks.metric_average._KeptStates",)),
        Seam("_initial_epoch", "The epoch where BackupAndRestore starts `fit`."),
        Seam("_compile_config", "The arguments of `compile`, functions as objects."),
        Seam("_compile_metrics", "The container of the metrics of `compile`."),
        Seam("_compile_loss", "The container of the losses of `compile`."),
        Seam("_loss_tracker", "The mean of the losses, which a train_step updates."),
    ),
    "keras.src.trainers.trainer.Trainer": (
        Seam("compile(optimizer, loss, ...)",
             "Distributes under keras.distribution.", replaced_by=(_ENABLE,)),
        Seam("_resolve_auto_jit_compile()",
             "Tells what Keras has chosen from what a user has passed.",
             replaced_by=(_XLA,)),
    ),
    "keras.src.trainers.compile_utils.CompileMetrics": (
        Seam("_user_metrics", "The metrics of `compile`, before they are built."),
    ),
    "keras.src.trainers.compile_utils.CompileLoss": (
        Seam("_flat_losses", "The losses of all outputs, with their weights."),
    ),
    "keras.src.backend.tensorflow.distribution_lib": (
        *(Seam(signature, "Keras on TensorFlow has prototypes here.",
               replaced_by=(_ENABLE,))
          for signature in (
              "list_devices(device_type)", "_to_backend_mesh(device_mesh)",
              "_to_backend_layout(tensor_layout)")),
        *(Seam(signature, "Keras calls it, and has it on JAX alone.",
               replaced_by=(_ENABLE,), is_optional=True)
          for signature in ("initialize(job_addresses, num_processes, process_id)",
                            "num_processes()", "process_id()",
                            "get_device_count(device_type)",
                            "distribute_tensor(tensor, layout)")),
    ),
    "keras.src.distribution.distribution_lib.Distribution": (
        Seam("__init__(device_mesh, ...)", "Checks that the mesh has all ranks.",
             replaced_by=(_ENABLE,)),
    ),
    **dict.fromkeys(
        ("keras.distribution.DataParallel", "keras.distribution.ModelParallel"),
        (
            Seam("distribute_dataset(dataset)", "All ranks get equally many batches.",
                 replaced_by=(_ENABLE,)),
        ),
    ),
    "keras.losses.Loss": (
        Seam("__call__(y_true, y_pred, sample_weight)",
             "A verification notes losses that are not means.", replaced_by=(_RECORD,)),
    ),
    "keras.callbacks.CallbackList": (
        Seam("on_train_batch_end(batch, logs)",
             "A verification records the steps of `fit`, and ends an epoch early.",
             replaced_by=(_RECORD, _DECISIONS), is_ordered=True),
        Seam("on_test_batch_end(batch, logs)", "Ends an evaluation early.",
             replaced_by=(_DECISIONS,)),
        Seam("on_epoch_end(epoch, logs)", "Ends the script after an epoch.",
             replaced_by=(_DECISIONS,)),
    ),
    **{
        f"keras.callbacks.{name}": (
            Seam("on_epoch_end(epoch, logs)",
                 "A verification notes the value that it decides by.",
                 replaced_by=(_DECISIONS,)),
        )
        for name in ("EarlyStopping", "ReduceLROnPlateau")
    },
    "keras.Sequential": (
        Seam("_functional", "The graph of a sequential model."),
    ),
    "keras.src.models.functional.Functional": (
        Seam("_nodes_by_depth", "The calls of layers in the order of computation."),
    ),
    "keras.src.models.cloning": (
        Seam("_wrap_clone_function(clone_function, call_function, recursive, cache)",
             "A sharded layer has the config of the full layer.",
             replaced_by=("keras.sharded_models.install",)),
    ),
    "keras.layers.Layer": (
        Seam("call(...)",
             "Runs twice: with the gradients it is recomputed. Gathers the weights.",
             replaced_by=("parallel.recomputation.remat",
                          "parallel.gathered_calls.gather_in_calls")),
        Seam("add_weight(shape, initializer, dtype, trainable, ...)",
             "A weight is sharded as soon as it is created.",
             replaced_by=("parallel.creation.shard_when_created",)),
        Seam("_flatten_layers(include_self, recursive)",
             "All layers inside of a layer; the public `layers` has one level."),
        Seam("_clear_losses()", "The losses of a trace have no value."),
        Seam("_seed_generators", "Which layer has drawn random numbers."),
        Seam("_called", "Whether a layer outside of all models takes part."),
        Seam("_trainable_variables",
             "A layer's own weights, frozen or not, without those of sublayers."),
        Seam("_non_trainable_variables", "As _trainable_variables."),
        Seam("_check_load_own_variables(store)",
             "Keras' error for a file with another number of weights."),
        Seam("_inbound_nodes", "The outputs of a layer in a model, with their masks."),
    ),
    "keras.layers.TextVectorization": (
        Seam("_lookup_layer", "Counts the words."),
    ),
    "keras.utils.FeatureSpace": (
        Seam("_is_adapted", "Set after its layers are adapted one by one."),
        Seam("_sublayers_built", "As _is_adapted."),
    ),
    "keras.src.layers.preprocessing.discretization": (
        Seam("merge_summaries(prev_summary, next_summary, epsilon)", "Adds a rank's."),
    ),
    "keras.src.layers.preprocessing.image_preprocessing.base_image_preprocessing_layer."
    "BaseImagePreprocessingLayer": (
        Seam("call(data, training)", "A verification leaves augmentation out.",
             replaced_by=("verify.left_out.leave_out_augmentation",)),
    ),
    "keras.Variable": (
        Seam("__init__(initializer, ...)", "A verification names each variable.",
             replaced_by=(_RECORD,)),
        Seam("_deferred_initialize()", "As add_weight, where Keras infers shapes.",
             replaced_by=("parallel.creation.shard_when_created",)),
        Seam("_path", "Slots are named after it: a shard has the path of its weight."),
        *(Seam(name, "Read where a shard is stored, and layers see the full value.",
               is_optional=name == "_unique_id")
          for name in ("_value", "_shape", "_dtype", "_autocast", "_unique_id",
                       "_maybe_autocast(value)", "_direct_assign(value)")),
    ),
    "keras.KerasTensor": (
        Seam("_keras_history", "The layer that an input of a graph comes from."),
        Seam("_keras_mask", "The mask of an output; absent without one.",
             is_optional=True),
    ),
    "keras.layers.BatchNormalization": (
        Seam("_moments(inputs, mask)", "Computed over ranks.",
             replaced_by=("keras.layers.synchronize_moments", _ENABLE)),
        Seam("_reduction_axes", "The axes of _moments."),
    ),
    "keras.layers.MultiHeadAttention": (
        Seam("_build_attention(rank)",
             "Overridden: the layer of dropout draws for all heads."),
        *_ATTENTION,
        *(Seam(name, "An argument of the layer.")
          for name in ("_num_heads", "_key_dim", "_value_dim", "_use_bias",
                       "_attention_axes", "_output_shape", "_dropout")),
        Seam("_use_gate", "An argument of the layer.", is_optional=True),
    ),
    "keras.layers.GroupQueryAttention": (
        *_ATTENTION,
        *(Seam(name, "Is made by `build`, which is overridden, and read by `call`.")
          for name in ("_softmax", "_dot_product_equation", "_combine_equation")),
    ),
    "keras.metrics.Metric": (
        Seam("_metrics", "The metrics inside of a metric."),
        Seam("_variables",
             "A metric's own states; the public `variables` has those inside, too."),
    ),
    "keras.metrics.MeanMetricWrapper": (
        Seam("_fn(y_true, y_pred, ...)", "The function whose results are averaged."),
        Seam("_fn_kwargs", "Its arguments, such as the axis."),
    ),
    "keras.metrics.Mean": (
        Seam("update_state(values, sample_weight)",
             "Leaves out a loss that is not finite.",
             replaced_by=("training.skipping.Skipping",)),
        Seam("result()",
             "The mean of no losses is NaN; Keras has 0, the best loss of all.",
             replaced_by=("training.skipping.Skipping",)),
    ),
    "keras.src.backend.common.masking": (
        Seam("get_keras_mask(x)", "Masks of the arguments of a layer."),
        Seam("set_keras_mask(x, mask)", "Masks of tensors that the package computes."),
    ),
    "keras.src.backend": (
        Seam("in_stateless_scope()",
             "Whether Keras infers shapes; a layer is not recomputed then."),
    ),
    "keras.src.backend.random": (
        Seam("dropout(inputs, rate, noise_shape, seed)",
             "A verification leaves it out: masks depend on the size of a batch.",
             replaced_by=("verify.left_out.leave_out_dropout",)),
        *(Seam(f"{name}(shape, ...)",
               "A verification gives one process the numbers that ranks have drawn.",
               replaced_by=("verify.noise.exchange_noise",))
          for name in ("normal", "truncated_normal", "uniform", "randint")),
    ),
    "keras.src.backend.common.name_scope": (
        Seam("current_path()", "The layer whose output has a layout."),
    ),
    "keras.src.backend.common.global_state": (
        Seam("get_global_attribute(name, default, set_to_default)",
             "Keras' seed generator, if it exists: checkpoints hold its state. The "
             "arguments `current_call_ctx` and dtype `autocast_scope` of a call."),
        Seam("set_global_attribute(name, value)",
             "A second pass of a layer has the arguments and dtype of the first one."),
    ),
    "keras.src.random.seed_generator": (
        Seam("global_seed_generator()",
             "Makes this generator, to restore its state or to set it by rank."),
        Seam("draw_seed(seed)",
             "The seed of Keras' random functions: a shard continues the full draw."),
    ),
    "keras.src.utils.naming": (
        Seam("to_snake_case(name)",
             "Which names Keras has made from a class, and numbered: in checkpoints."),
    ),
    "keras.src.api_export": (
        Seam("get_name_from_symbol(symbol)",
             "Whether a base class is public: an object is saved as one of it."),
    ),
    "keras.src.utils.io_utils": (
        Seam("print_msg(message, line_break)",
             "Prints as Keras' own callbacks do: through absl, if print is disabled."),
    ),
}
# fmt: on

# The place of the last replacement in `replaced_by`, by target and name.
_places: weakref.WeakKeyDictionary[object, dict[str, int]] = weakref.WeakKeyDictionary()


def replace(
    target: object,
    name: str,
    function: Callable[..., Any],
    *,
    by: type | Callable[..., Any],
) -> Any:
    """Replace an attribute of an object, class or module of Keras; return the original.

    Args:
        target: what has the attribute.
        name: the attribute.
        function: the new value.
        by: our class or function that replaces it, as the table has it.

    Raises:
        ValueError: the table has no such replacement, or has another order.
    """
    replacer = f"{by.__module__}.{by.__qualname__}".removeprefix("hvdtrain.")
    seam = _find(target, name, replacer)
    place = seam.replaced_by.index(replacer)
    if seam.is_ordered:
        last = _places.setdefault(target, {}).get(name, -1)
        if place <= last:
            raise ValueError(
                f"{name} of {target!r} was replaced by {seam.replaced_by[last]}, and "
                f"then by {replacer}. Expected, the outermost last: "
                f"{', '.join(seam.replaced_by)}."
            )
        _places[target][name] = place
    original = getattr(target, name, *([None] if seam.is_optional else []))
    setattr(target, name, function)
    return original


def _find(target: object, name: str, replacer: str) -> Seam:
    for owner_name, seams in SEAMS.items():
        for seam in seams:
            if seam.name == name and replacer in seam.replaced_by:
                owner = pkgutil.resolve_name(owner_name)
                is_class = isinstance(owner, type)
                if target is owner or (is_class and isinstance(target, owner)):
                    return seam
    raise ValueError(
        f"hvdtrain.keras.seams has no row by which {replacer} replaces {name} of "
        f"{target!r}. Add one: it is where an upgrade of Keras looks."
    )
