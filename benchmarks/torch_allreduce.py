"""PyTorch's Gloo as a path of `benchmarks.allreduce`, in the processes of its job.

TensorFlow and Horovod are loaded before PyTorch. Horovod, whose symbols are global,
exports none of its own, older Gloo, so that PyTorch calls the Gloo of its own build.
"""

import contextlib
import datetime
import os
from collections.abc import Iterator

import torch
import torch.distributed as distributed

from benchmarks.allreduce_paths import Maker, Run
from hvdtrain import handshake
from hvdtrain.collectives.transport.links import PeerListener
from hvdtrain.handshake import Address
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.job.formation import interface_of

VERSION = torch.__version__
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"
_TIMEOUT = datetime.timedelta(seconds=60)


@contextlib.contextmanager
def connected(world: World) -> Iterator[Maker]:
    """Connect the ranks over Gloo in the block, and yield a function of sizes.

    A collective. PyTorch computes with one thread from then on.

    Raises:
        SharedJobError: a rank has no address for the others.
        JobError: a reduction is not the sum.
        RuntimeError: this rank cannot be connected.
    """
    torch.set_num_threads(1)
    store: distributed.TCPStore | None = None
    with fail_together(world, expected=(JobError, OSError)):
        address = _own_address(world)
        os.environ.setdefault(_INTERFACE, interface_of(address))
        if world.is_chief:
            store = _serve(address)
    host, port = gather(world, (address, store.port if store else 0))[0]
    # Not in `fail_together`: a rank that has failed would wait in it for ranks that
    # still try to connect to it.
    store = store or _call((host, port))
    distributed.init_process_group(
        "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=_TIMEOUT,
    )
    with fail_together(world):
        check_sum(world)
    yield _make
    # Not after an error: the other ranks may be in a reduction.
    distributed.destroy_process_group()


def _own_address(world: World) -> str:
    """Return the address of this host at which hvdtrain connects hosts as well.

    Raises:
        OSError: the network interface of the job has no address.
    """
    if world.local_size == world.size:
        return _LOOPBACK
    with contextlib.closing(PeerListener()) as listener:
        return listener.address[0]


def _serve(host: str) -> distributed.TCPStore:
    # A socket of ours: the store's own would listen at all addresses of this host.
    listening = handshake.listen(host)
    return distributed.TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _call(address: Address) -> distributed.TCPStore:
    return distributed.TCPStore(*address, timeout=_TIMEOUT, wait_for_workers=False)


def check_sum(world: World) -> None:
    """Raise a `JobError` unless a reduction is the sum over all ranks. A collective."""
    reduced = torch.full((1000,), world.rank + 1.0)
    distributed.all_reduce(reduced)
    expected = world.size * (world.size + 1) / 2
    if not (reduced == expected).all():
        raise JobError(
            f"PyTorch reduced 1 to {world.size} to {reduced[0].item():g}; expected the "
            f"sum, {expected:g}."
        )


def _make(count: int) -> Run:
    # Zeros: each reduction replaces its input by the sum, which stays finite.
    numbers = torch.zeros(count // 4)

    def run(repeats: int) -> None:
        for _ in range(repeats):
            distributed.all_reduce(numbers)

    return run
