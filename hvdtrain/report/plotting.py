"""A PNG file of runs. Importing this module loads matplotlib, an extra."""

import functools
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from hvdtrain.log import Line
from hvdtrain.report import goodput
from hvdtrain.report.runs import LoggedRun

Series = tuple[list[int], list[float]]
Color = str | tuple[float, float, float, float]

_COLUMNS = 2
# Fields of log.jsonl by the titles of their panels.
_SHARES = {
    "communication, share of the time": "communication",
    "input wait, share of the time": "input_wait",
}
_SPEED = "samples/s of steps alone"
_ARRIVAL = "arrival, ms a step after the first rank: "
_MAX_NAMED_RANKS = 8
# By cause, none of which is the color of a run; gray is time that no step took.
_CAUSE_COLORS = (
    *("#0b6e4f", "#c9ada7", "#9e2a2b", "#5c4742", "#b497d6"),
    *("#83c5be", "#e9d985", "#d17a94", "#cccccc"),
)
# Ranks have shades of gray, since colors are those of runs.
_DARKEST, _LIGHTEST = 0.0, 0.65
_RANK_STYLES = ("-", "--", "-.", (0, (1, 1)))
# Values of a loss, and the largest learning rates of the runs, that differ by a larger
# factor have a logarithmic axis.
_LINEAR_FACTOR = 30
# The range of a logarithmic axis below the smallest peak: a decay to 0 has no end.
_DECADES_BELOW = 2
# Width of the figure, and of the line and the gap of each entry.
_LEGEND_CHARACTERS, _ENTRY_CHARACTERS = 140, 8
_RESTART: dict[str, Any] = {"linestyle": (0, (1, 2)), "linewidth": 1.2, "alpha": 0.8}
_EVALUATION: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5}
_EVALUATION |= {"markeredgecolor": "black", "markeredgewidth": 0.7}


def draw(runs: Sequence[LoggedRun], path: str | os.PathLike) -> None:
    """Draw metrics, learning rate and speed by step to a PNG file."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    panels = [*metrics, "learning rate", _SPEED]
    for title in _SHARES:
        if any(math.isfinite(y) for run in runs for y in _share(run, title)[1]):
            panels.append(title)
    panels += [_ARRIVAL + run.name for run in runs if any(map(_arrivals, run.lines))]
    rows = math.ceil(len(panels) / _COLUMNS)
    heights = [3.1] * rows + [0.8 + 0.3 * len(runs)]
    # Not `pyplot`: it needs a display, or the choice of a backend.
    figure = Figure(figsize=(11, sum(heights) + 0.8), layout="constrained")
    grid = figure.add_gridspec(rows + 1, _COLUMNS, height_ratios=heights)
    axes: list[Axes] = []
    for number in range(len(panels)):
        place = grid[divmod(number, _COLUMNS)]
        axes.append(figure.add_subplot(place, sharex=axes[0] if axes else None))
    _draw_goodput(figure.add_subplot(grid[rows, :]), runs)
    colors = _colors(len(runs))
    for name, ax in zip(panels, axes, strict=True):
        for run, color in zip(runs, colors, strict=True):
            _draw_run(ax, name, run, color)
        _finish(ax, name, is_lowest=axes.index(ax) + _COLUMNS >= len(panels))
        for run, color in zip(runs, colors, strict=True):
            # The panel of a run's arrivals has no lines of other runs.
            is_shown = not name.startswith(_ARRIVAL) or name == _ARRIVAL + run.name
            for step in run.restarts if is_shown else ():
                ax.axvline(step, color=color, **_RESTART)
    _add_legends(figure, runs, colors)
    figure.savefig(path, format="png", dpi=120)


def _colors(count: int) -> Sequence[Color]:
    # The palette of ten is easier to read.
    if count <= 10:
        return [f"C{number}" for number in range(count)]
    return list(matplotlib.colormaps["turbo"].resampled(count)(range(count)))


def _draw_run(ax: Axes, name: str, run: LoggedRun, color: Color) -> None:
    if name == "learning rate":
        series = run.series("progress", lambda line: line.get("learning_rate"))
        ax.plot(*series, color=color)
    elif name in _SHARES:
        ax.plot(*_share(run, name), color=color, linewidth=1)
    elif name.startswith(_ARRIVAL):
        if name == _ARRIVAL + run.name:
            _draw_arrivals(ax, run)
    elif name == _SPEED:
        series = run.series("progress", lambda line: line.get("samples_per_second"))
        ax.plot(*series, color=color, linewidth=1)
    else:
        # A metric may exist in training or in evaluation alone.
        training, evaluation = (
            run.series(event, lambda line: line["metrics"].get(name))
            for event in ("progress", "evaluation")
        )
        ax.plot(*training, color=color, linewidth=1.2, alpha=0.75)
        ax.plot(*evaluation, color=color, zorder=3, **_EVALUATION)


def _share(run: LoggedRun, title: str) -> Series:
    return run.series("progress", lambda line: line.get(_SHARES[title]))


def _draw_arrivals(ax: Axes, run: LoggedRun) -> None:
    ranks = max(len(_arrivals(line)) for line in run.lines)
    for rank, shade in enumerate(np.linspace(_DARKEST, _LIGHTEST, ranks)):
        series = run.series("progress", functools.partial(_milliseconds_late, rank))
        style = _RANK_STYLES[rank % len(_RANK_STYLES)]
        ax.plot(
            *series,
            color=str(shade),
            linestyle=style,
            linewidth=1,
            label=f"rank {rank}",
        )
    if ranks <= _MAX_NAMED_RANKS:
        ax.legend(fontsize=8, frameon=False)


def _arrivals(line: Line) -> list[float]:
    return (line.get("straggler") or {}).get("late_seconds_by_rank") or []


def _milliseconds_late(rank: int, line: Line) -> float | None:
    arrivals = _arrivals(line)
    # A job may continue with fewer ranks.
    return 1000 * arrivals[rank] if rank < len(arrivals) else None


def _draw_goodput(ax: Axes, runs: Sequence[LoggedRun]) -> None:
    """Draw a bar for each run, stacked from the shares of its wall time."""
    totals = [goodput.compute_goodput(run.lines) for run in runs]
    starts = np.zeros(len(runs))
    for cause, color in zip(goodput.CAUSES, _CAUSE_COLORS, strict=True):
        # A run that has only just started has no time.
        parts = np.array([t[cause] / (sum(t.values()) or 1.0) for t in totals])
        if parts.any():
            ax.barh(range(len(runs)), parts, left=starts, color=color, label=cause)
        starts += parts
    ax.set_title("wall time by cause", fontsize=11)
    ax.set_yticks(range(len(runs)), [run.name for run in runs])
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.spines[["top", "right"]].set_visible(False)
    if starts.any():
        below = (0.5, -0.25)
        ax.legend(
            loc="upper center", bbox_to_anchor=below, ncols=5, fontsize=9, frameon=False
        )


def _finish(ax: Axes, name: str, *, is_lowest: bool) -> None:
    # Not in the name of a run.
    title = name if name.startswith(_ARRIVAL) else name.replace("_", " ")
    ax.set_title(title, fontsize=11)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.tick_params(labelbottom=is_lowest)
    if is_lowest:
        ax.set_xlabel("global step")
    if name == _SPEED:
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    if name in _SHARES:
        ax.yaxis.set_major_formatter(PercentFormatter(1))
    if name in ("learning rate", _SPEED, *_SHARES) or name.startswith(_ARRIVAL):
        ax.set_ylim(bottom=0)
    arrays = [np.asarray(line.get_ydata(), float) for line in ax.lines]
    curves = [array[~np.isnan(array)].tolist() for array in arrays]
    if name == "loss" and _spans_decades([y for curve in curves for y in curve]):
        ax.set_yscale("log")
    peaks = [max(curve) for curve in curves if curve]
    if name == "learning rate" and _spans_decades(peaks):
        ax.set_yscale("log")
        ax.set_ylim(min(peaks) / 10**_DECADES_BELOW, 2 * max(peaks))


def _spans_decades(values: Sequence[float]) -> bool:
    return min(values, default=0) > 0 and max(values) / min(values) > _LINEAR_FACTOR


def _add_legends(
    figure: Figure, runs: Sequence[LoggedRun], colors: Sequence[Color]
) -> None:
    handles = [
        Line2D([], [], color=color, linewidth=3, label=run.name)
        for run, color in zip(runs, colors, strict=True)
    ]
    _add_legend(figure, handles, "outside upper center")
    handles = [
        Line2D([], [], color="gray", label="training"),
        Line2D([], [], color="gray", label="evaluation", **_EVALUATION),
    ]
    if any(run.restarts for run in runs):
        handles.append(Line2D([], [], color="gray", label="restart", **_RESTART))
    _add_legend(figure, handles, "outside lower center")


def _add_legend(
    figure: Figure,
    handles: Sequence[Line2D],
    location: Literal["outside upper center", "outside lower center"],
) -> None:
    longest = (
        max(len(str(handle.get_label())) for handle in handles) + _ENTRY_CHARACTERS
    )
    figure.legend(
        handles=handles,
        loc=location,
        ncols=max(1, min(len(handles), _LEGEND_CHARACTERS // longest)),
        frameon=False,
    )
