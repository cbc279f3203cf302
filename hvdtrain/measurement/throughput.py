"""Speed, step time and its parts, memory and start-up of a workload."""

import functools

import hvdtrain.keras as hvd
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.keras import gradients
from hvdtrain.measurement import (
    equivalence,
    one_process,
    variants,
    workloads,
)
from hvdtrain.measurement.figures import summarize

_LINE_STEPS = 25


def measure(options, world):
    """Measure a workload on the ranks of this job. A collective.

    Args:
        options: the `BenchmarkOptions`, with defaults.
        world: the `World`.

    Returns:
        A dict for JSON, the same on all ranks; docs/benchmark.md describes it.
    """
    names = () if options.strategy == "horovod" else one_process.devices(options)
    workload = workloads.load(options, world)
    start = variants.StartUp()
    with fail_together(world):
        model, train, make_others = _variants(workload, options, world, names, start)
    speeds = variants.warm_up(world, {"train": train})
    memory = gather(world, variants.memory())
    # Only now: their models are not part of the training's memory.
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
    buckets = gradients.group_bytes(model.trainable_variables) if count > 1 else []
    if count > 1 and options.consistency_steps and options.workload != "backward":
        figures["consistency"] = equivalence.measure(options, world, workload, names)
    return {
        "data": workload.note,
        "warning": workload.warning,
        "reduced_bytes": sum(buckets),
        "memory": memory,
        "start_up": start.figures,
        **figures,
    }


def _variants(workload, options, world, names, start):
    """Return the model, the variant `train`, and a function that makes the others.

    Args:
        workload: the `Workload`.
        options: the `BenchmarkOptions`.
        world: the `World`.
        names: devices of a strategy in one process; empty for one process per device.
        start: the `fitting.StartUp` of the training.
    """
    callbacks = [start]
    if options.workload == "resnet18" and world.is_chief:
        steps = options.steps_per_execution
        callbacks.append(
            variants.StepLines(every_steps=_LINE_STEPS, steps_per_execution=steps)
        )
    if names:
        model = one_process.build(options, workload, names)
        input_fn = workload.input(options, devices=len(names))
        train = one_process.train(model, input_fn, options, callbacks=callbacks)
        make_others = functools.partial(
            one_process.others, model, workload, options, names
        )
        return model, train, make_others
    model = workload.build(world.size)
    hvd.DistributedOptimizer(model.optimizer)
    input_fn = workload.input(options, rank=world.rank, size=world.size)
    train = variants.trained(
        model, input_fn, workload, options, world, callbacks=callbacks
    )
    return model, train, functools.partial(_others, model, workload, options, world)


def _others(model, workload, options, world):
    """Return the variants that the training is compared with, by name.

    Without those that are the same as another one: a constant batch where the input
    is synthetic; no reduction and a rank alone where there is one rank.
    """
    constant = workload.constant_batches()
    plain = workload.build()
    measured = {"function": variants.called(model, constant, options)}
    if workload.batches:

        def constant_input(start, end):
            return constant.take(end - start)

        measured["constant"] = variants.trained(
            model, constant_input, workload, options, world
        )
    if world.size > 1:
        measured["local"] = variants.called(plain, constant, options)
        measured["alone"] = variants.trained_alone(
            plain, workload.input(options), options
        )
    measured["bare"] = variants.bare(plain, workload, options)
    return measured
