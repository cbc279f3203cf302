"""The ranks of a job whose processes a platform has started, by its variables.

Each process knows its rank, the number of ranks and the address of rank 0, and nothing
of the others. `formation` makes a job of them.
"""

import dataclasses
import hashlib
import importlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from hvdtrain import output
from hvdtrain.environment import is_elastic
from hvdtrain.job import launchers
from hvdtrain.job.world import JobError

_PRINT_SECONDS = 1.0

# Where rank 0 listens if the platform names its host alone.
DEFAULT_PORT = 29310
# torchrun's agent has MASTER_PORT itself: how many ports above it are tried.
_PORTS = 16
# Below those that Linux gives to connections.
_SLURM_PORTS = range(20000, 32000)
_SLURM_SIZE = "SLURM_STEP_NUM_TASKS"
_RESOURCES = pathlib.Path("/opt/ml/input/config/resourceconfig.json")
_READ_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError)


class OtherTaskError(JobError):
    """The task of this process is not to train: an evaluator, which may end."""

    exit_code = 0


@dataclasses.dataclass(frozen=True)
class PlatformTask:
    """A rank as a platform describes it.

    Attributes:
        variable: the one that describes the job.
        host: name or address of the host of rank 0.
        ports: of rank 0, which listens at the first one that is free.
        job: text that distinguishes jobs at one address.
        declared: what has declared the ranks, for messages; by default `variable`.
        doubt: why the other ranks may never come, and the remedy, as sentences.
    """

    variable: str
    rank: int
    size: int
    host: str
    ports: tuple[int, ...]
    job: str = ""
    declared: str = ""
    doubt: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise JobError(
                f"Received rank {self.rank} of {self.size} by {self.variable}; "
                f"expected a rank from 0 to {self.size - 1}."
            )
        is_port = all(port in range(1, 1 << 16) for port in self.ports)
        if self.size > 1 and (not is_port or ":" in self.host or not self.host):
            raise JobError(
                f"Received the address {self.address} of rank 0 by {self.variable}; "
                "expected a name or an IPv4 address, and a port from 1 to 65535."
            )

    @property
    def declaration(self) -> str:
        """What has declared the ranks, for messages."""
        return self.declared or f"{self.variable} of {self.size} processes"

    @property
    def address(self) -> str:
        """Where rank 0 listens, for messages."""
        return f"{self.host}:{self.ports[0]}"

    @property
    def key(self) -> str:
        """A text that is equal on the ranks of this job, and on no others."""
        parts = (self.variable, self.address, self.job)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def form_job(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make a job of this process and the others that a platform has started.

    Sets the variables of horovodrun in `environ`. Does nothing where a launcher has set
    them, and where no platform declares several processes.

    Raises:
        JobError: the description is wrong, or not all ranks are here in time, or
            `launchers.drop_stale` raises it.
    """
    launchers.drop_stale(environ)
    is_alone = environ.get("HVDTRAIN_ALONE") == "1"
    if is_alone or launchers.has_rendezvous(environ) or is_elastic():
        return
    try:
        task = read(environ)
    except OtherTaskError as error:
        output.write_error(f"hvd.init: {error}\n", timeout_seconds=_PRINT_SECONDS)
        # A platform would take another code for a failure of the whole job.
        sys.exit(0)
    if task is None:
        return
    # Not at the top: it loads the Python part of Horovod.
    found = importlib.import_module("hvdtrain.job.formation").join(task)
    # A network that the user has chosen is kept.
    interface = environ.get(launchers.GLOO_INTERFACE) or found["NCCL_SOCKET_IFNAME"]
    given = environ.get("NCCL_SOCKET_IFNAME", interface)
    kept = {launchers.GLOO_INTERFACE: interface, "NCCL_SOCKET_IFNAME": given}
    environ.update(found | kept)


def read(environ: Mapping[str, str]) -> PlatformTask | None:
    """Return what a platform says of this process; None if it is not one of several.

    The first variable that describes a job decides among these. A launcher may still
    declare more processes: see `declared_size`.

    Raises:
        OtherTaskError: the process is not to train, and may end.
        JobError: a description is incomplete, or has another form.
    """
    for variable, reader in _READERS.items():
        try:
            task = reader(environ)
        except _READ_ERRORS as error:
            raise JobError(
                f"Received {variable}={environ.get(variable, '')!r:.200}, which does "
                f"not describe a job ({type(error).__name__}: {error}); set it as the "
                "platform's documentation says, or remove it."
            ) from error
        if task:
            return task if task.size > 1 else None
    # Last: scripts of other platforms set a size alone, too.
    for size, rank in (("WORLD_SIZE", "RANK"), ("PET_NNODES", "PET_NODE_RANK")):
        given = environ.get(size, "")
        if rank not in environ and given.isdigit() and int(given) > 1:
            raise _missing(size, rank)
    return None


def _read_own(environ: Mapping[str, str]) -> PlatformTask | None:
    """Variables of a manifest, such as the one of an indexed Job of Kubernetes."""
    if not environ.get("HVDTRAIN_SIZE"):
        return None
    index = "JOB_COMPLETION_INDEX"
    rank = environ.get("HVDTRAIN_RANK") or environ.get(index)
    size = int(environ["HVDTRAIN_SIZE"])
    if size == 1:
        return _alone("HVDTRAIN_SIZE")
    if not rank:
        raise _missing("HVDTRAIN_SIZE", f"HVDTRAIN_RANK (or {index})")
    if not (address := environ.get("HVDTRAIN_ADDRESS")):
        raise _missing("HVDTRAIN_SIZE", "HVDTRAIN_ADDRESS, the host of rank 0")
    host, port = _split(address)
    job = environ.get("HVDTRAIN_JOB", "")
    ports = tuple(port + i for i in range(_PORTS if job else 1))
    return PlatformTask(
        *("HVDTRAIN_SIZE", int(rank), size, host, ports, job),
        declared=environ.get("HVDTRAIN_DECLARED", ""),
        doubt=_doubt_in_shell(environ),
    )


def _read_torch(environ: Mapping[str, str]) -> PlatformTask | None:
    """torchrun, accelerate, and Kubeflow's PyTorchJob.

    As "Environment variables" in the documentation of torchrun.
    """
    if "WORLD_SIZE" not in environ or "RANK" not in environ:
        return None
    size, rank = int(environ["WORLD_SIZE"]), int(environ["RANK"])
    if size == 1:
        return _alone("WORLD_SIZE")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise _missing("RANK and WORLD_SIZE", name)
    port = int(environ["MASTER_PORT"])
    ports = [port]
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        ports = [port + 1 + i for i in range(_PORTS)]
    job = environ.get("TORCHELASTIC_RUN_ID", "")
    return PlatformTask(
        "WORLD_SIZE", rank, size, environ["MASTER_ADDR"], tuple(ports), f"{port} {job}"
    )


def _read_trainer(environ: Mapping[str, str]) -> PlatformTask | None:
    """The runtime torch-distributed of Kubeflow Trainer: the options of torchrun."""
    if "PET_NNODES" not in environ or "PET_NODE_RANK" not in environ:
        return None
    size, rank = int(environ["PET_NNODES"]), int(environ["PET_NODE_RANK"])
    if size == 1:
        return _alone("PET_NNODES")
    host, port = environ["PET_MASTER_ADDR"], int(environ["PET_MASTER_PORT"])
    return PlatformTask("PET_NNODES", rank, size, host, (port,))


def _read_tf_config(environ: Mapping[str, str]) -> PlatformTask | None:
    """TF_CONFIG, as tf.distribute.cluster_resolver.TFConfigClusterResolver reads it.

    Ranks have the order of MultiWorkerMirroredStrategy: the chief, then the workers.
    """
    return _read_cluster("TF_CONFIG", environ, ("chief", "master", "worker"))


def _read_vertex(environ: Mapping[str, str]) -> PlatformTask | None:
    """Vertex AI: "Distributed training" in its documentation."""
    if '"workerpool0"' not in environ.get("CLUSTER_SPEC", ""):
        # A variable of another program.
        return None
    return _read_cluster("CLUSTER_SPEC", environ, ("workerpool0", "workerpool1"))


def _read_cluster(
    variable: str, environ: Mapping[str, str], trainers: Sequence[str]
) -> PlatformTask | None:
    config = json.loads(environ.get(variable) or "{}")
    cluster = config.get("cluster") or {}
    task = config.get("task") or {}
    addresses = [each for name in trainers for each in cluster.get(name, ())]
    kind, index = task.get("type", ""), int(task.get("index", 0))
    if kind not in trainers:
        if not cluster or (not kind and len(addresses) < 2):
            return None
        raise _other_task(variable, kind, trainers)
    if not 0 <= index < len(cluster[kind]):
        raise IndexError(f"the cluster has no task {index} of type {kind}")
    before = trainers[: trainers.index(kind)]
    rank = index + sum(len(cluster.get(name, ())) for name in before)
    host, port = _split(addresses[0])
    return PlatformTask(variable, rank, len(addresses), host, (port,))


def _other_task(variable: str, kind: str, trainers: Iterable[str]) -> JobError:
    expected = " or ".join(trainers)
    if kind == "evaluator" or kind == "workerpool3":
        return OtherTaskError(
            f"This task is the {kind} of {variable}, and has nothing to do: all ranks "
            "evaluate together. It ends."
        )
    return JobError(
        f"Received the task type {kind!r} in {variable}; expected {expected}. Ranks "
        "reduce gradients with each other: a job has no parameter servers."
    )


def _read_sagemaker(environ: Mapping[str, str]) -> PlatformTask | None:
    """SageMaker: ENVIRONMENT_VARIABLES.md of its training toolkit."""
    if "SM_HOSTS" not in environ:
        return None
    return _of_hosts(
        "SM_HOSTS", json.loads(environ["SM_HOSTS"]), environ.get("SM_CURRENT_HOST")
    )


def _read_sagemaker_file(environ: Mapping[str, str]) -> PlatformTask | None:
    """A container of SageMaker without its toolkit, by "resourceconfig.json"."""
    if "TRAINING_JOB_NAME" not in environ or not _RESOURCES.exists():
        return None
    config = json.loads(_RESOURCES.read_text("utf-8"))
    return _of_hosts("TRAINING_JOB_NAME", config["hosts"], config["current_host"])


def _read_slurm(environ: Mapping[str, str]) -> PlatformTask | None:
    """Slurm without PMIx: "Output environment variables" in the manual of srun."""
    names = (_SLURM_SIZE, "SLURM_PROCID", "SLURM_STEP_NODELIST")
    if any(name not in environ for name in names):
        return None
    size, rank, nodes = (environ[name] for name in names)
    # The first node has task 0: "n[01-04,07],m1" begins with n01.
    found = re.match(r"([^,[]*)(?:\[(\d+)[^]]*\])?([^,[]*)", nodes)
    host = "".join(filter(None, found.groups() if found else ()))
    job, step = int(environ["SLURM_JOB_ID"]), environ.get("SLURM_STEP_ID", "")
    # Other jobs may have tasks on this node.
    first = _SLURM_PORTS.start + job * _PORTS % len(_SLURM_PORTS)
    return PlatformTask(
        _SLURM_SIZE,
        int(rank),
        int(size),
        _node_of_task_0(environ, host),
        tuple(range(first, first + _PORTS)),
        job=f"{job}.{step}",
        doubt=_doubt_of_node(environ, host) or _doubt_in_shell(environ),
    )


def _node_of_task_0(environ: Mapping[str, str], first: str) -> str:
    """Return the node where the other ranks look for rank 0.

    Args:
        first: the first node of the step. Slurm sorts the nodes, also where the tasks
            have another order.
    """
    if address := environ.get("HVDTRAIN_ADDRESS"):
        return _split(address)[0]
    node = environ.get("SLURMD_NODENAME", first)
    is_searched = environ["SLURM_PROCID"] == "0" and environ[_SLURM_SIZE] != "1"
    if is_searched and node != first:
        raise JobError(
            f"Received task 0 on node {node}; expected it on {first}, the first one of "
            "SLURM_STEP_NODELIST, where the other ranks look for it. Set "
            f"HVDTRAIN_ADDRESS={node} for all tasks."
        )
    return first


def _doubt_of_node(environ: Mapping[str, str], first: str) -> str:
    is_arbitrary = environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    if "HVDTRAIN_ADDRESS" in environ or environ["SLURM_PROCID"] == "0":
        return ""
    if not is_arbitrary and "SLURM_HET_SIZE" not in environ:
        return ""
    return (
        "In a heterogeneous job, or with --distribution=arbitrary, task 0 may be on "
        f"another node than {first}: set HVDTRAIN_ADDRESS to its node. "
    )


def _doubt_in_shell(environ: Mapping[str, str]) -> str:
    # The steps that are started in such a shell inherit the variable.
    if "SLURM_PTY_PORT" not in environ or environ.get("SLURM_PROCID") != "0":
        return ""
    return (
        "SLURM_PTY_PORT is set, as in the shell of an interactive step: if this is "
        "one, it runs a script once, and srun --overlap starts all ranks. "
    )


def _of_hosts(variable: str, hosts: list[Any], host: str | None) -> PlatformTask:
    if len(hosts) > 1 and host not in hosts:
        raise _missing(variable, "SM_CURRENT_HOST, one of them")
    rank = hosts.index(host) if host in hosts else 0
    return PlatformTask(variable, rank, len(hosts), hosts[0], (DEFAULT_PORT,))


def _alone(variable: str) -> PlatformTask:
    # It needs no address.
    return PlatformTask(variable, rank=0, size=1, host="", ports=(0,))


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon:
        return address, DEFAULT_PORT
    return host.strip("[]"), int(port)


def _missing(variable: str, name: str) -> JobError:
    return JobError(
        f"Received {variable} without {name}: the ranks cannot find each other. Set "
        "it, or HVDTRAIN_ALONE=1 if each process is to train alone."
    )


_READERS: dict[str, Callable[[Mapping[str, str]], PlatformTask | None]] = {
    "HVDTRAIN_SIZE": _read_own,
    "WORLD_SIZE": _read_torch,
    "PET_NNODES": _read_trainer,
    "TF_CONFIG": _read_tf_config,
    "CLUSTER_SPEC": _read_vertex,
    "SM_HOSTS": _read_sagemaker,
    "TRAINING_JOB_NAME": _read_sagemaker_file,
    _SLURM_SIZE: _read_slurm,
}
