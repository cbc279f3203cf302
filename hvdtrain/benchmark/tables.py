"""The figures as text: the table of a result, and of several results."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hvdtrain.banner import name_hosts, name_threads, name_versions
from hvdtrain.job import JobError

# Version of the JSON files: increase it when a figure changes its name or its meaning.
FORMAT = 4
NOT_MEASURED = "-"
# With fewer rounds, a median is no protection against one slow round.
_MIN_ROUNDS = 3
_LABEL_WIDTH = 15
_COLUMN_WIDTH = 22

# The dict of `conditions.describe`, and the figures in it, whose keys
# docs/figures/benchmark.md has.
Result = Mapping[str, Any]
Figures = Mapping[str, Any]
# Label and text.
Row = tuple[str, str]


def training(result: Result) -> str:
    """Return the table of a result with `figures`."""
    size, figures = result["size"], result["figures"]
    rows = [
        *environment_rows(result),
        *_workload(result["flags"], figures),
        *_speed(figures),
        *_split(figures),
        *doubt_rows(result),
        *_doubts_of_split(figures),
        *_one_rank(figures["one_rank"], figures["devices"], size),
        *_load_balance(figures),
        *_resources(figures),
    ]
    return "\n".join(label_rows(rows))


def environment_rows(result: Result) -> Iterator[Row]:
    """Yield versions, ranks and machine of a result."""
    path = result["path"]
    if result["size"] > 1:
        path = f"{result['controller']}; reduction: {path}"
    yield "versions", name_versions(result["versions"])
    hosts, threads = name_hosts(result["hosts"]), name_threads(result["threads"])
    yield "ranks", f"{hosts}; {path}; threads per rank: {threads}"
    yield "machine", f"{result['machine']}; load average {result['load_average']:.1f}"


def _workload(flags: Mapping[str, Any], figures: Figures) -> Iterator[Row]:
    text = f"{flags['workload']}, {flags['strategy']}; data: {figures['data']}"
    # Files of earlier versions have no such flag.
    if flags.get("jit_compile"):
        text = f"{text}; jit_compile"
    yield "workload", text
    yield "batch", f"{batch_text(flags)} per variant"
    if figures["warning"]:
        yield "WARNING", figures["warning"]


def batch_text(flags: Mapping[str, Any]) -> str:
    """Return batch and rounds as text."""
    return (
        f"{flags['batch_size']} per rank; {flags['steps_per_execution']} steps per "
        f"execution; {flags['rounds']} rounds of {flags['seconds']:g} s"
    )


def _speed(figures: Figures) -> Iterator[Row]:
    by_rank = figures["samples_per_second_by_rank"]
    per_rank = ", ".join(number(speed) for speed in by_rank[:8])
    more = ", ..." if len(by_rank) > 8 else ""
    yield (
        "speed",
        f"{number(figures['samples_per_second'])} samples/s; by rank {per_rank}{more}",
    )
    times = figures["step_seconds"]
    names = ("mean", "p50", "p90", "p99")
    yield "step", ", ".join(f"{name} {milliseconds(times[name])}" for name in names)


def _split(figures: Figures) -> Iterator[Row]:
    parts = measured_parts(figures)
    # Each is the median over rounds: they add up to their step in a round alone.
    total = sum(parts[name] or 0.0 for name in parts if name != "step")
    before = 0.0
    notes = {
        "compute": "forward and backward pass, update",
        "communication": f"not hidden; {size_text(figures['reduced_bytes'])} reduced",
        "overhead": "of fit, callbacks, Python",
        "input_wait": "for the input pipeline",
    }
    for name, note in notes.items():
        seconds, share = parts[name], NOT_MEASURED
        if seconds is not None:
            # The differences of rounded sums add up to 100 %.
            after = before + seconds
            share = f"{round(after / total, 3) - round(before / total, 3):.1%}"
            before = after
        yield (
            f"  {name.replace('_', ' ')}",
            f"{milliseconds(seconds):>11} {share:>7}  {note}",
        )


def doubt_rows(result: Result) -> Iterator[Row]:
    """Yield the reasons to doubt any figure of this run."""
    flags = result["flags"]
    threads, load = sum(result["threads"]), result["load_average"]
    if load > threads:
        yield (
            "WARNING",
            f"the load average before was {load:.1f}, and the ranks have {threads} "
            "threads: other programs disturb the figures",
        )
    if flags["rounds"] < _MIN_ROUNDS:
        yield (
            "WARNING",
            f"fewer than {_MIN_ROUNDS} rounds: medians do not exclude a slow one; use "
            "more --rounds",
        )


def _doubts_of_split(figures: Figures) -> Iterator[Row]:
    if min(figures["split_seconds"].values()) < 0:
        yield (
            "WARNING",
            "a part of the step is negative: it is smaller than the noise of this "
            "machine; use more --rounds",
        )


def _one_rank(figures: Figures, count: int, size: int) -> Iterator[Row]:
    unit = "rank" if size == count else "device"
    bare = (
        f"{number(figures['bare_samples_per_second'])} samples/s; one {unit} has "
        f"{figures['against_bare']:.2f} of it"
    )
    if count > 1:
        yield (
            f"one {unit}",
            f"{number(figures['samples_per_second'])} samples/s; {count} {unit}s are "
            f"{figures['speedup']:.2f} times as fast, efficiency "
            f"{figures['efficiency']:.2f}",
        )
        bare += f", {count} {unit}s {figures['all_ranks_against_bare']:.2f}"
    yield "bare Keras", bare


def _load_balance(figures: Figures) -> Iterator[Row]:
    if figures["reduced_bytes"]:
        yield "load balance", f"mean over maximum {figures['load_balance']:.2f}"


def _resources(figures: Figures) -> Iterator[Row]:
    peak = max(each["peak_resident"] for each in figures["memory"])
    text = f"peak of a rank {size_text(peak)}"
    shares = [each.get("proportional") for each in figures["memory"]]
    if all(shares):
        text += f"; PSS of all ranks {size_text(sum(shares))}"
    yield "memory", text
    start = figures["start_up"]
    yield (
        "start-up",
        f"{start['seconds']:.1f} s from {start['command']} to the first step",
    )


def comparison(results: Mapping[str, Any]) -> str:
    """Return the table, one column for each result.

    Args:
        results: contents of JSON files, by path.

    Raises:
        JobError: a file was not written by `--json` of this version for a training.
    """
    columns = [_read_column(path, result) for path, result in results.items()]
    return "\n".join(
        f"{label:<{_COLUMN_WIDTH}}"
        + "".join(f"{column[label]:>{_COLUMN_WIDTH}}" for column in columns)
        for label in columns[0]
    )


def _read_column(path: str, result: Any) -> dict[str, str]:
    try:
        if result["format"] == FORMAT:
            return _column(result)
    # The keys that `_column` reads are the only schema of these files.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        pass
    raise JobError(
        f"Received --compare with {path}; expected a file that --json wrote for a "
        "training in this version."
    )


def _column(result: Mapping[str, Any]) -> dict[str, str]:
    flags, figures = result["flags"], result["figures"]
    parts, one = measured_parts(figures), figures["one_rank"]
    has_several = figures["devices"] > 1
    balance = f"{figures['load_balance']:.2f}"
    memory = figures["memory"]
    peaks = [each["peak_resident"] for each in memory]
    shares = [each.get("proportional", each["peak_resident"]) for each in memory]
    return {
        "strategy": flags["strategy"],
        "workload": flags["workload"],
        "processes x devices": f"{result['size']} x "
        f"{figures['devices'] // result['size']}",
        "batch": f"{flags['batch_size'] * figures['devices']}",
        "path": result["path"],
        "samples/s": number(figures["samples_per_second"]),
        "against one": f"{one['speedup']:.2f}" if has_several else NOT_MEASURED,
        "step": milliseconds(parts["step"]),
        "communication": milliseconds(parts["communication"]),
        "reduced": size_text(figures["reduced_bytes"]),
        "load balance": balance if has_several else NOT_MEASURED,
        "memory, all": size_text(sum(shares)),
        "memory, largest peak": size_text(max(peaks)),
    }


def label_rows(rows: Iterable[Row]) -> list[str]:
    """Return the lines of labels and texts."""
    return [f"{label:<{_LABEL_WIDTH}}{text}" for label, text in rows]


def measured_parts(figures: Figures) -> dict[str, Any]:
    """Return the seconds of a step and its parts, None if not measured.

    Without the variant that it is computed from, a part is zero by construction.
    """
    variants = figures["rounds"]["step_seconds_by_rank"][0]
    needed = {"communication": "local", "input_wait": "constant"}
    return {
        name: seconds if needed.get(name, name) in {name, *variants} else None
        for name, seconds in figures["split_seconds"].items()
    }


def milliseconds(seconds: float | None) -> str:
    """Return seconds as text in milliseconds, three decimals below 10 and else one."""
    if seconds is None:
        return NOT_MEASURED
    value = 1000 * seconds
    digits = 3 if abs(value) < 10 else 1
    return f"{value:,.{digits}f} ms"


def number(value: float) -> str:
    """Return a number as text, with three significant digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size_text(count: float) -> str:
    """Return a number of bytes as text, in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
