"""A timed training of a workload of `benchmarks.loads` with PyTorch's DDP over Gloo."""

import itertools
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.load_options import Run, TrainingOptions
from benchmarks.loads import BATCHES, Dlrm, Gpt2
from benchmarks.torch_loads import DlrmModule, Gpt2Module

_WARM_UP_STEPS = 3


def measure(options: TrainingOptions) -> tuple[int, Run]:
    """Train the twin of a Keras model on the processes that torchrun has started.

    Returns:
        The rank, and the figures of all ranks, the same on all of them.
    """
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    load = options.sized_load()
    torch.manual_seed(0)
    module = _module(load, options)
    step = _make_step(load, module, options)
    count = sum(each.numel() for each in module.parameters())
    endless = itertools.cycle(batches(load, rank))
    _run(step, endless, 1)
    warm = _run(step, endless, _WARM_UP_STEPS)
    # Rank 0's on all ranks: with other numbers of steps, the ranks would deadlock.
    steps = torch.tensor(max(2, round(options.seconds / warm)))
    distributed.broadcast(steps, 0)
    seconds = _run(step, endless, int(steps))
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gathered: list[Any] = [None] * size
    distributed.all_gather_object(gathered, (seconds, peak, count))
    times, memory, counts = zip(*gathered, strict=True)
    distributed.destroy_process_group()
    return rank, Run(
        samples_per_second=sum(load.batch_size / each for each in times),
        peak_resident=list(memory),
        parameters=list(counts),
    )


def _module(load: Gpt2 | Dlrm, options: TrainingOptions) -> nn.Module:
    if isinstance(load, Gpt2):
        return Gpt2Module(load)
    return DlrmModule(load, sparse=options.kind == "ddp_sparse")


def _make_step(
    load: Gpt2 | Dlrm, module: nn.Module, options: TrainingOptions
) -> Callable[[tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
    """Return a function that takes a step and returns the loss."""
    # A view spares a copy of all gradients; sparse ones have none.
    is_sparse = options.kind == "ddp_sparse"
    model = DistributedDataParallel(module, gradient_as_bucket_view=not is_sparse)
    optimizer = _optimizer(load, module, options)
    is_half = isinstance(load, Gpt2) and options.dtype == "bfloat16"

    def step(x: tuple[torch.Tensor, ...], y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            outputs = model(*x)
            loss = compute_loss(load, outputs, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compute_loss(
    load: Gpt2 | Dlrm, outputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the mean loss of a batch."""
    if isinstance(load, Gpt2):
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    return functional.binary_cross_entropy_with_logits(outputs, targets)


def _optimizer(
    load: Gpt2 | Dlrm, module: nn.Module, options: TrainingOptions
) -> torch.optim.Optimizer:
    if isinstance(load, Dlrm):
        return torch.optim.SGD(module.parameters(), load.learning_rate)
    settings: dict[str, Any] = {
        "lr": load.learning_rate,
        "betas": load.betas,
        "eps": load.epsilon,
        "weight_decay": load.weight_decay,
        "fused": True,
    }
    if options.kind == "zero":
        adam = torch.optim.AdamW
        return ZeroRedundancyOptimizer(module.parameters(), adam, **settings)
    return torch.optim.AdamW(module.parameters(), **settings)


def batches(
    load: Gpt2 | Dlrm, rank: int, *, count: int = BATCHES
) -> list[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    """Return the inputs and the targets of each batch of a rank."""
    x, y = load.samples(count * load.batch_size, seed=rank)
    arrays = [*(x if isinstance(x, tuple) else (x,)), y]
    # cross_entropy takes no int32.
    tensors = [torch.from_numpy(each.copy()) for each in arrays]
    if isinstance(load, Gpt2):
        tensors[-1] = tensors[-1].long()
    split = zip(*(each.split(load.batch_size) for each in tensors), strict=True)
    return [(tuple(inputs), targets) for *inputs, targets in split]


def _run(
    step: Callable[..., torch.Tensor], endless: Iterator[tuple], count: int
) -> float:
    """Return the mean seconds of so many steps, which start on all ranks at once."""
    distributed.barrier()
    start = time.perf_counter()
    for x, y in itertools.islice(endless, count):
        step(x, y)
    return (time.perf_counter() - start) / count
