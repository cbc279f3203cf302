"""A table of the costs of runs, with a column for each run."""

from collections.abc import Sequence

from hvdtrain.log import Line
from hvdtrain.report.runs import (
    LoggedRun,
    compute_costs,
    compute_delays,
    duration_text,
)

_NONE = "-"
_GAP = 2
_MAX_WIDTH = 100
_MAX_CAUSES = 3


def table(runs: Sequence[LoggedRun]) -> str:
    """Return the table as text; columns that do not fit are in a table below it."""
    columns = [_column(run) for run in runs]
    # Runs may have different metrics.
    labels = list(dict.fromkeys(label for column in columns for label in column))
    labels.sort(key=_order)
    first = max(map(len, labels)) + _GAP
    widths = [max(map(len, column.values())) + _GAP for column in columns]
    count = max(1, (_MAX_WIDTH - first) // max(widths))
    return "\n\n".join(
        "\n".join(
            f"{label:<{first}}"
            + "".join(
                f"{columns[number].get(label, _NONE):>{widths[number]}}"
                for number in range(len(runs))[i : i + count]
            )
            for label in labels
        )
        for i in range(0, len(runs), count)
    )


def _order(label: str) -> tuple[bool, bool]:
    # Metrics stand below the step of their evaluation; sorting is stable.
    return (label.startswith("best "), label.startswith("last "))


def _column(run: LoggedRun) -> dict[str, str]:
    cost = compute_costs(run.lines)
    values = map(run.summary.get, ("model", "dataset", "optimizer"))
    names = [value for value in values if isinstance(value, str)]
    return {
        "run": run.name,
        "model, data, optimizer": ", ".join(names) or _NONE,
        "ranks": ", ".join(str(ranks) for ranks in dict.fromkeys(cost.ranks)),
        "global batch": f"{cost.global_batch_size:,}",
        "steps": f"{cost.step:,} of {cost.max_steps:,}",
        "samples": f"{cost.samples:,}",
        "running time": duration_text(cost.seconds),
        "samples/s of running time": f"{cost.samples_per_second:,.0f}",
        "samples/s of steps alone": f"{cost.speed_of_steps:,.0f}",
        "starts": f"{cost.starts:,}",
        "steps repeated": f"{cost.repeated_steps:,}",
        "late rank": _late_rank(run),
        **_evaluation("last", cost.evaluations[-1] if cost.evaluations else None),
        **_evaluation("best", cost.best_evaluation),
    }


def _late_rank(run: LoggedRun) -> str:
    """Return the rank that was late most, and the share of the time by cause."""
    delays = compute_delays(run.lines)
    if not delays:
        return _NONE
    rank = max(delays, key=lambda rank: sum(delays[rank].values()))
    causes = list(delays[rank].items())[:_MAX_CAUSES]
    shares = ", ".join(f"{cause} {100 * share:.1f} %" for cause, share in causes)
    return f"{rank}: {shares}" if shares else _NONE


def _evaluation(which: str, line: Line | None) -> dict[str, str]:
    if line is None:
        return {f"{which} evaluation, step": _NONE}
    metrics = line["metrics"]
    return {
        f"{which} evaluation, step": f"{line['step']:,}",
        **{
            f"{which} {name}": _number(metrics[name])
            for name in sorted(metrics, key=lambda name: (name != "loss", name))
        },
    }


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4f}"
