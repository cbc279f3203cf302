"""A Keras optimizer whose gradients are combined over all ranks.

Why the optimizer keeps its class, and is not wrapped in a class of ours: Keras writes
the class of a compiled optimizer into `.keras` files, so a model trained with a wrapper
could not be loaded without this package. And Keras accumulates gradients and then clips
them inside one method: no wrapper around the optimizer can reach the point between. So
a hook is composed into the optimizer, at that point.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import keras

from hvdtrain.collectives.dtypes import Compression
from hvdtrain.collectives.process_sets import ProcessSet, global_process_set
from hvdtrain.collectives.transport import Average, Sum, op_name
from hvdtrain.keras import compiled_gradients, sharded_models
from hvdtrain.keras.gradients import GradientOptions, GradientReducer, Groups
from hvdtrain.keras.hook import ReductionHook
from hvdtrain.keras.loss_reductions import check_computed_losses
from hvdtrain.keras.multi_optimizer import MultiOptimizerHook
from hvdtrain.keras.replication import get_hook
from hvdtrain.keras.sharded_state import ShardedState
from hvdtrain.keras.variables import (
    Optimizer,
    find_optimizers,
    get_inner_optimizer,
    is_distributed,
    is_multi_optimizer,
    local_variables,
    optimizers_inside,
)

if TYPE_CHECKING:
    # The floor above.
    from hvdtrain.parallel.mesh import Mesh


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    mesh: "Mesh | None" = None,
    shard_state: bool = False,
) -> Optimizer:
    """Make a Keras optimizer combine its gradients over all ranks.

    Gradients are reduced after Keras has accumulated them and before it clips
    them, so N ranks take the step that one process takes on the N-times batch. The
    reduction is part of `apply_gradients`: it works under `fit`, in a `train_step`
    and in a loop of your own.

    Signature and meaning follow `horovod.tensorflow.keras.DistributedOptimizer`.
    Unlike there, `optimizer` itself is changed and returned: it keeps its class,
    its name and its state, and a model saved with it loads without this package.

    Args:
        optimizer: built or not. Under mixed precision: the plain optimizer or a
            `LossScaleOptimizer` around it.
        name: prefix of the operations' names, as Horovod's timeline and messages
            show them. By default Distributed and the optimizer's class.
        device_dense: device of the reduction of dense gradients.
        device_sparse: device of the reduction of `tf.IndexedSlices`.
        compression: dtype on the wire: `Compression.none`, `fp16` or `bf16`.
        sparse_as_dense: reduce `tf.IndexedSlices` as dense tensors.
        gradient_predivide_factor: with Average, divide by it before the sum and
            multiply after it.
        op: `Average`, or `Sum`, for losses that are sums over samples. Those of
            `add_loss` must be such sums, too. Regularizers are not: with `Sum`,
            `compute_loss` of a model that has them raises an error. It warns of losses
            of `compile` that `op` does not fit: see `loss_reductions`.
        backward_passes_per_step: apply once in so many calls, on the accumulated
            gradients: Keras' `gradient_accumulation_steps`.
        average_aggregated_gradients: average these calls' gradients instead of
            summing them. Keras' own `gradient_accumulation_steps` always averages.
        num_groups: Horovod's deprecated name of `groups`.
        groups: number of groups, or list of lists of variables, that are reduced
            together. By default gradients are grouped by size, some 16 MB each.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients of local variables by the number
            of ranks.
        mesh: instead of `process_set`, for models that are sharded. Gradients are
            reduced along its axis data.
        shard_state: shard the optimizer's state over the ranks that reduce gradients
            together, by variable. All ranks call `model.save` then, which saves all of
            it.

    Returns:
        `optimizer`, with a method `register_local_var(variable)` added.

    Raises:
        TypeError: if `optimizer` is not a Keras optimizer.
        ValueError: for arguments out of range or excluding each other, and for an
            optimizer that is distributed already.
    """
    if mesh is not None:
        process_set = _data_ranks(mesh, process_set)
    return distribute(
        optimizer,
        GradientOptions.from_arguments(locals()),
        name=name,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        mesh=mesh,
        shard_state=shard_state,
    )


def distribute(
    optimizer: Optimizer,
    options: GradientOptions,
    *,
    name: str | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    mesh: "Mesh | None" = None,
    shard_state: bool = False,
) -> Optimizer:
    """Hook a reduction with these options into `optimizer`, and return it."""
    _check_optimizer(optimizer)
    if not isinstance(shard_state, bool):
        raise ValueError(
            f"Received shard_state={shard_state!r}; expected True or False. To shard "
            "large variables by element, use parallel.fully_shard."
        )
    compiled_gradients.install()
    check_computed_losses()
    if options.reduction.op not in (Average, Sum):
        raise ValueError(
            "op must be hvd.Average or hvd.Sum. Received: "
            f"op=hvd.{op_name(options.reduction.op)}. For hvd.Adasum, use "
            "hvd.DistributedGradientTape with the plain optimizer."
        )
    base = get_inner_optimizer(optimizer)
    hook_class: type[ReductionHook] = ReductionHook
    if is_multi_optimizer(base):
        _check_multi_optimizer(base, backward_passes_per_step, shard_state)
        hook_class = MultiOptimizerHook
    reducer = GradientReducer(name or f"Distributed{type(base).__name__}", options)
    _accumulate(base, backward_passes_per_step)
    sums_window = backward_passes_per_step > 1 and not average_aggregated_gradients
    # The hook replaces `build` as well, and must wrap the replacement of the state.
    sharded_state = ShardedState(base, reducer) if shard_state else None
    if shard_state or mesh:
        # `model.save` gathers shards: rank 0 alone would block in it.
        sharded_models.install()
    hook = hook_class(
        base,
        reducer,
        window_factor=backward_passes_per_step if sums_window else 1,
        mesh=mesh,
        sharded_state=sharded_state,
    )
    if sharded_state and base.built:
        # After the hook, whose `build` also marks the slots of sharded layers.
        sharded_state.rebuild()
    optimizer.register_local_var = reducer.register_local
    if base is not optimizer:
        hook.share_finite_check(optimizer)
    return optimizer


def configure_compiled_model(model: keras.Model) -> None:
    """Change what `model.compile` decided for one process.

    Under the policy `mixed_float16`, `compile` puts a `LossScaleOptimizer` around
    the optimizer. Its check for overflow is local: the other ranks would block in the
    reduction of a step that one rank skips. It becomes one check of all ranks. With
    `jit_compile=True`, XLA compiles the gradients and not their reduction; on GPUs,
    where `compile` enables XLA by default, this default is disabled, with a warning on
    rank 0. And a training step that was traced before the optimizer was distributed is
    discarded, since it reduces nothing. The same holds for distributed optimizers that
    are attributes of the model.

    Call it before the first training step; `BroadcastGlobalVariablesCallback` and
    `elastic.KerasState` do.

    Raises:
        TypeError: for the result of Horovod's own `DistributedOptimizer`.
    """
    _check_not_horovods(getattr(model, "optimizer", None))
    hooks = [(o, hook) for o in find_optimizers(model) if (hook := get_hook(o))]
    if not hooks:
        return
    for optimizer, hook in hooks:
        if not hook.is_configured:
            hook.is_configured = True
            model.train_function = None
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            hook.share_finite_check(optimizer)
    compiled_gradients.disable_default(model)


def _check_optimizer(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "DistributedOptimizer takes an instance of keras.optimizers.Optimizer. "
            f"Received: {optimizer!r} of type {type(optimizer).__name__}"
        )
    _check_not_horovods(optimizer)
    if is_distributed(optimizer) or any(
        is_distributed(inside) for inside in optimizers_inside(optimizer)
    ):
        raise ValueError(
            f"This {type(optimizer).__name__} is distributed already: its gradients "
            "would be reduced twice. Call DistributedOptimizer once per optimizer."
        )


def _check_multi_optimizer(
    optimizer: Optimizer, passes: int, shard_state: bool
) -> None:
    if passes != 1:
        raise ValueError(
            "The optimizers of a MultiOptimizer accumulate gradients each for itself. "
            f"Received: backward_passes_per_step={passes}. Give them "
            "gradient_accumulation_steps instead."
        )
    if shard_state:
        raise ValueError(
            "The state of a MultiOptimizer cannot be sharded: each of its optimizers "
            f"has its own. Received: {optimizer.name!r} with shard_state=True. Use "
            "shard_state=False."
        )


def _check_not_horovods(optimizer: Optimizer | None) -> None:
    # Horovod creates a class at run time, which has the name of the optimizer's.
    cls = type(get_inner_optimizer(optimizer))
    if cls.__module__.startswith("horovod."):
        raise TypeError(
            "horovod.tensorflow.keras.DistributedOptimizer reduces no gradients on "
            f"Keras 3. Received: an optimizer of the class {cls.__module__}."
            f"{cls.__name__}. Change `import horovod.tensorflow.keras as hvd` to "
            "`import hvdtrain.keras as hvd` in the file that creates it."
        )


def _data_ranks(mesh: "Mesh", process_set: ProcessSet) -> ProcessSet:
    if process_set is not global_process_set:
        raise ValueError(
            "A mesh has the process set of the optimizer. Received: mesh and "
            f"process_set of the ranks {list(process_set.ranks)}. Pass one of them."
        )
    return mesh.data.process_set


def _accumulate(optimizer: Optimizer, passes: int) -> None:
    if not isinstance(passes, int) or passes < 1:
        raise ValueError(
            f"backward_passes_per_step must be a positive integer. Received: {passes}"
        )
    # The numbers are equal in an optimizer that was saved with
    # backward_passes_per_step.
    if passes in (1, optimizer.gradient_accumulation_steps):
        return
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            "backward_passes_per_step and the optimizer's gradient_accumulation_steps "
            f"are one number. Received: {passes} and "
            f"{optimizer.gradient_accumulation_steps}. Give one of them."
        )
    if optimizer.built:
        raise ValueError(
            "backward_passes_per_step needs an optimizer that has not been built: a "
            "built one has no room for accumulated gradients. Create it with "
            f"gradient_accumulation_steps={passes} instead."
        )
    optimizer.gradient_accumulation_steps = passes


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """Make an optimizer combine the gradients of all but some layers.

    Other arguments are as in `DistributedOptimizer`.

    Args:
        local_layers: built layers that each rank trains on its own batch alone.
        scale_local_gradients: divide their gradients by the number of ranks, as
            Horovod does, so that they weigh as much as averaged ones.

    Raises:
        ValueError: for a local layer that is no Keras layer or has not been built.
    """
    variables = local_variables(local_layers)
    options = GradientOptions.from_arguments(locals())
    distributed = distribute(optimizer, options, name=name)
    for variable in variables:
        distributed.register_local_var(variable)
    return distributed
