"""What is printed about a run before its first step."""

from collections import Counter
from collections.abc import Mapping, Sequence

from hvdtrain.events import RunStart


def name_hosts(hosts: Sequence[str]) -> str:
    """Return the number of ranks on each host, as a text."""
    return ", ".join(f"{count} on {host}" for host, count in Counter(hosts).items())


def name_versions(versions: Mapping[str, str]) -> str:
    """Return the versions of packages, as a text."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def name_threads(threads: Sequence[int]) -> str:
    """Return the numbers of threads of the ranks, as a text."""
    return " or ".join(str(count) for count in sorted(set(threads)))


def banner(start: RunStart) -> str:
    """Return the lines about a run that are printed before its first step."""
    connection = ""
    if start.ranks > 1:
        connection = f"{start.controller}; reduction: {start.reduction}; "
    quota = f"; CPU quota: {start.cpu_quota}" if start.cpu_quota else ""
    lines = [
        name_versions(start.versions),
        f"ranks          {name_hosts(start.hosts)}; {connection}threads per rank: "
        f"{name_threads(start.threads)}{quota}",
    ]
    if start.mesh["data"] != start.ranks:
        axes = (f"{axis} {start.mesh[axis]}" for axis in ("data", "pipeline", "model"))
        lines.append(f"mesh           {' x '.join(axes)}")
    lines += [
        f"model          {start.model}, {start.optimizer}",
        f"batch          {_batch(start)}",
        f"learning rate  {start.learning_rate:g}",
    ]
    if start.compiles_gradients:
        text = "compiles forward and backward pass, not the update"
        if start.ranks > 1:
            text = "compiles forward and backward pass; the reduction follows them"
        lines.append(f"XLA            {text}")
    if start.checkpoint:
        lines.append(f"continues      {_position(start)}")
    return "\n".join(lines)


def _position(start: RunStart) -> str:
    text = f"at step {start.step:,} from {start.checkpoint}"
    count = start.replicas_before
    if count is None or count == start.mesh["data"]:
        return text
    return f"{text}, which {_replicas(start, count)} wrote"


def _replicas(start: RunStart, count: int) -> str:
    return f"{count} {_kind(start)}{'s' if count > 1 else ''}"


def _kind(start: RunStart) -> str:
    return "rank" if start.mesh["data"] == start.ranks else "replica"


def _batch(start: RunStart) -> str:
    kind, window = _kind(start), start.accumulation_steps
    replicas = _replicas(start, start.mesh["data"])
    if len(set(start.local_batch_sizes)) == 1:
        text = f"{start.local_batch_sizes[0]} per {kind} x {replicas}"
    else:
        text = f"{start.global_batch_size} on {replicas}"
    if window > 1:
        text += f" x {window} accumulated"
    steps, unit = start.max_steps // window, "updates" if window > 1 else "steps"
    return f"{text} = {start.global_batch_size * window}; {steps:,} {unit}"
