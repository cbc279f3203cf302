"""Kinds of parallelism as text."""

from hvdtrain.measurement.tables import (
    doubts,
    head,
    labelled,
    milliseconds,
    size_text,
)

_WIDTH = 22


def table(result):
    """Return the table of a result of `parallelism.measure`.

    Args:
        result: a dict of it, with that of `hvdtrain.description.describe` and the
            flags.
    """
    flags = result["flags"]
    workload = flags["workload"]
    if workload == "recommender":
        tables = ", ".join(f"{int(rows):,}" for rows in flags["tables"])
        workload += f"; tables of {flags['columns']} columns and {tables} rows"
        workload += f"; {', '.join([*flags['units'], '1'])} units"
    rows = [
        *head(result),
        ("workload", f"{workload}; {flags['optimizer']}"),
        (
            "batch",
            f"{flags['batch_size']} per rank; {flags['steps_per_execution']} steps per "
            f"execution; {flags['rounds']} rounds of {flags['seconds']:g} s per kind",
        ),
        *doubts(result),
    ]
    lines = [*labelled(rows), "", "the most of a rank, and how many times replicated"]
    lines.append(_line("", ("weights and slots", "sent in a step", "step", "loss")))
    lines += [_line(name, _cells(each)) for name, each in result["parallelism"].items()]
    return "\n".join(lines)


def _cells(figures):
    ratios = figures["against_replicated"]
    texts = {
        "memory": size_text(largest_memory(figures)),
        "sent_bytes": size_text(max(figures["sent_bytes_by_rank"])),
        "step_seconds": milliseconds(figures["step_seconds"]),
    }
    cells = [f"{text} {ratios[name]:7.3f}" for name, text in texts.items()]
    return [*cells, f"{figures['loss']:.6f}"]


def largest_memory(figures):
    """Return the bytes of weights and slots of the rank with most of them.

    Args:
        figures: those of a kind, of `parallelism.measure`.
    """
    weights, slots = figures["weight_bytes_by_rank"], figures["slot_bytes_by_rank"]
    return max(map(sum, zip(weights, slots, strict=True)))


def _line(name, cells):
    return f"{name:<12}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells)
