"""A table of what runs cost, one column for each."""

import math

from hvdtrain.reporting.runs import costs

_NONE = "-"
_GAP = 2
_MAX_WIDTH = 100


def table(runs):
    """Return the table of `Run`s as text, in parts if it is wide."""
    columns = [_column(run) for run in runs]
    # Runs may have different metrics.
    labels = list(dict.fromkeys(label for column in columns for label in column))
    labels.sort(key=_order)
    first = max(map(len, labels)) + _GAP
    widths = [max(map(len, column.values())) + _GAP for column in columns]
    per_part = max(1, (_MAX_WIDTH - first) // max(widths))
    return "\n\n".join(
        "\n".join(
            f"{label:<{first}}"
            + "".join(
                f"{columns[number].get(label, _NONE):>{widths[number]}}"
                for number in part
            )
            for label in labels
        )
        for part in _divided(range(len(runs)), per_part)
    )


def _divided(numbers, count):
    return [numbers[i : i + count] for i in range(0, len(numbers), count)]


def _order(label):
    # Metrics stand below the step of their evaluation; sorting is stable.
    return (label.startswith("best "), label.startswith("last "))


def _column(run):
    cost, summary = costs(run.lines), run.summary
    named = (summary.get(name) for name in ("model", "dataset", "optimizer"))
    names = [name for name in named if isinstance(name, str)]
    return {
        "run": run.name,
        "model, data, optimizer": ", ".join(names) or _NONE,
        "ranks": ", ".join(str(ranks) for ranks in dict.fromkeys(cost.ranks)),
        "global batch": f"{cost.global_batch_size:,}",
        "steps": f"{cost.step:,} of {cost.max_steps:,}",
        "samples": f"{cost.samples:,}",
        "wall time": _duration(cost.seconds),
        "samples/s": f"{cost.samples_per_second:,.0f}",
        "starts": f"{cost.starts:,}",
        "steps repeated": f"{cost.repeated_steps:,}",
        **_evaluation("last", cost.evaluations[-1] if cost.evaluations else None),
        **_evaluation("best", cost.best_evaluation),
    }


def _evaluation(which, line):
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


def _number(value):
    return _NONE if value is None else f"{value:.4f}"


def _duration(seconds):
    minutes, seconds = divmod(math.floor(10 * max(0, seconds)) / 10, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{seconds:04.1f}"
