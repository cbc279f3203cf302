"""Speed, step time and its parts, memory and start-up of a workload."""

import functools
from collections.abc import Callable, Sequence

import keras

import hvdtrain.keras as hvd
from hvdtrain.benchmark import one_process, variants, workloads
from hvdtrain.benchmark.benchmark_options import BenchmarkOptions
from hvdtrain.benchmark.figures import Figures, summarize
from hvdtrain.benchmark.variants import Variant
from hvdtrain.benchmark.workloads import Workload
from hvdtrain.job import World
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.keras import gradients

_LINE_STEPS = 25


def measure(options: BenchmarkOptions, world: World) -> Figures:
    """Measure a workload on the ranks of this job. A collective.

    Args:
        options: with defaults.

    Returns:
        A dict for JSON, the same on all ranks; docs/figures/benchmark.md describes it.
    """
    names = () if options.strategy == "horovod" else one_process.make_devices(options)
    workload = workloads.load(options, world)
    start_up = variants.StartUpTimer()
    with fail_together(world):
        model, train, make_others = _variants(workload, options, world, names, start_up)
    speeds = variants.warm_up(world, {"train": train})
    memory = gather(world, variants.memory())
    # Made after the memory was measured: their models are not part of the training.
    with fail_together(world):
        others = make_others()
    speeds |= variants.warm_up(world, others)
    measured = variants.run_rounds(
        world,
        {"train": train, **others},
        speeds,
        rounds=options.rounds,
        seconds=options.seconds,
    )
    count = max(world.size, len(names))
    figures = summarize(gather(world, measured), options, count)
    groups = gradients.group_bytes(model.trainable_variables) if count > 1 else []
    return {
        "data": workload.note,
        "warning": workload.warning,
        "reduced_bytes": sum(groups),
        "memory": memory,
        "start_up": start_up.figures,
        **figures,
    }


def _variants(
    workload: Workload,
    options: BenchmarkOptions,
    world: World,
    names: Sequence[str],
    start_up: variants.StartUpTimer,
) -> tuple[keras.Model, Variant, Callable[[], dict[str, Variant]]]:
    """Return the model, the variant `train`, and a function that makes the others.

    Args:
        names: devices of a strategy in one process; empty for one process per device.
        start_up: a callback of the training.
    """
    callbacks = [start_up]
    if options.workload == "resnet18" and world.is_chief:
        steps = options.steps_per_execution
        callbacks.append(
            variants.StepLines(every_steps=_LINE_STEPS, steps_per_execution=steps)
        )
    if names:
        model = one_process.build(options, workload, names)
        input_fn = workload.input(options, devices=len(names))
        train = variants.fit_variant(
            model, input_fn, options, callbacks=lambda steps: callbacks
        )
        make_others = functools.partial(
            one_process.compared_variants, model, workload, options, names
        )
        return model, train, make_others
    model = workload.build(world.size)
    hvd.DistributedOptimizer(model.optimizer)
    input_fn = workload.input(options, rank=world.rank, size=world.size)
    train = variants.training_variant(
        model, input_fn, workload, options, world, callbacks=callbacks
    )
    make_others = functools.partial(_compared_variants, model, workload, options, world)
    return model, train, make_others


def _compared_variants(
    model: keras.Model, workload: Workload, options: BenchmarkOptions, world: World
) -> dict[str, Variant]:
    """Return the variants that the training is compared with, by name.

    Variants that equal another one are left out: `constant` where the input is
    synthetic, `local` and `alone` where there is one rank.
    """
    constant = workload.constant_batches()
    plain = workload.build()
    steps = options.steps_per_execution
    measured = {"function": variants.function_variant(model, constant, steps)}
    if workload.batches:
        measured["constant"] = variants.training_variant(
            model, workload.constant_input(), workload, options, world
        )
    if world.size > 1:
        measured["local"] = variants.function_variant(plain, constant, steps)
        measured["alone"] = variants.lone_training_variant(
            plain, workload.input(options), options
        )
    # Nothing of hvdtrain is in it.
    measured["bare"] = variants.fit_variant(plain, workload.constant_input(), options)
    return measured
