"""Draws a picture of figures that --json of a benchmark wrote. Needs matplotlib.

python -m benchmarks.charts --output=allreduce.png allreduce.json

Argument: the file of --json of hvdtrain.benchmark, benchmarks.allreduce or
benchmarks.parallelism.
"""

import importlib
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from absl import flags

from benchmarks.allreduce import sent_bytes
from benchmarks.parallelism import largest_memory
from hvdtrain import program
from hvdtrain.benchmark import records, tables
from hvdtrain.flag_fields import PathParser
from hvdtrain.job import JobError
from hvdtrain.job.files import atomic_write, check_picture, writing_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# What can be drawn.
_KINDS = {"collectives", "parallelism", "figures"}


def main(paths: list[str]) -> None:
    """Draw the picture of one file."""
    if len(paths) > 1:
        raise JobError(f"Received {len(paths)} files; expected one.")
    output = flags.FLAGS.output
    check_picture(output, "--output")
    (result,) = records.read_json(paths).values()
    is_result = isinstance(result, dict) and result.get("format") == tables.FORMAT
    if not is_result or not _KINDS & result.keys():
        raise JobError(
            f"Received {paths[0]}; expected a file that --json of hvdtrain.benchmark, "
            "benchmarks.allreduce or benchmarks.parallelism wrote in this version."
        )
    with writing_output(output, "--output"), atomic_write(output) as temporary:
        draw(result, temporary)
    print(f"written to {output}", flush=True)


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw the result of a benchmark as a PNG file."""
    # Imported here, since matplotlib is an extra. Without pyplot, which needs a display
    # or the choice of a backend.
    matplotlib_figure = importlib.import_module("matplotlib.figure")
    figure = matplotlib_figure.Figure(figsize=(10, 4.5), layout="constrained")
    if "collectives" in result:
        _draw_collectives(figure, result)
    elif "parallelism" in result:
        _draw_parallelism(figure, result)
    else:
        _draw_training(figure, result)
    figure.savefig(path, format="png", dpi=120)


def _draw_collectives(figure: "Figure", result: Mapping[str, Any]) -> None:
    size = result["size"]
    rows = result["collectives"]["rows"]
    counts = [row["bytes"] for row in rows]
    latency, bandwidth = figure.subplots(1, 2)
    for name in rows[0]["seconds"]:
        seconds = [row["seconds"][name] for row in rows]
        latency.loglog(counts, [1e6 * each for each in seconds], "o-", label=name)
        speeds = [
            sent_bytes(count, size) / each / 1e9
            for count, each in zip(counts, seconds, strict=True)
        ]
        bandwidth.loglog(counts, speeds, "o-", label=name)
    figure.suptitle(f"allreduce of float32 over {size} ranks ({result['machine']})")
    latency.set(xlabel="bytes", ylabel="microseconds")
    bandwidth.set(xlabel="bytes", ylabel="GB/s: bytes x 2 (N-1)/N per second")
    latency.legend()


def _draw_parallelism(figure: "Figure", result: Mapping[str, Any]) -> None:
    kinds = result["parallelism"]
    panels = {
        "MB of weights and slots": [
            largest_memory(each) / 1e6 for each in kinds.values()
        ],
        "MB sent in a step": [
            max(each["sent_bytes_by_rank"]) / 1e6 for each in kinds.values()
        ],
        "milliseconds per step": [
            1000 * each["step_seconds"] for each in kinds.values()
        ],
    }
    figure.suptitle(
        f"{result['flags']['workload']}, ranks: {result['size']}; the most of a rank "
        f"({result['machine']})"
    )
    for axes, (label, values) in zip(
        figure.subplots(1, 3), panels.items(), strict=True
    ):
        axes.bar_label(axes.barh(list(kinds), values), fmt="%.3g", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.set(xlabel=label)


def _draw_training(figure: "Figure", result: Mapping[str, Any]) -> None:
    figures, flags = result["figures"], result["flags"]
    split, times = figure.subplots(1, 2, width_ratios=(2, 3))
    # Bars side by side, not stacked: differences of noisy times may be negative.
    measured = tables.measured_parts(figures)
    parts = {name: 1000 * each for name, each in measured.items() if each is not None}
    bars = split.barh([name.replace("_", " ") for name in parts], parts.values())
    split.bar_label(bars, fmt="%.3g", padding=3)
    split.axvline(0, color="black", linewidth=0.8)
    split.invert_yaxis()
    split.margins(x=0.25)
    split.set(xlabel="milliseconds", title="a step and its parts, all ranks")
    by_rank = figures["rounds"]["step_seconds_by_rank"][0]
    for name, seconds in by_rank.items():
        numbers = range(1, len(seconds) + 1)
        times.plot(numbers, [1000 * each for each in seconds], "o-", label=name)
    times.xaxis.get_major_locator().set_params(integer=True)
    times.set(
        xlabel="round",
        ylabel="milliseconds per step",
        title="the variants, rank 0",
        ylim=(0, None),
    )
    times.legend(loc="lower right")
    figure.suptitle(
        f"{flags['workload']}, {flags['strategy']}, ranks: {result['size']}: "
        f"{figures['samples_per_second']:,.0f} samples/s ({result['machine']})"
    )


if __name__ == "__main__":
    flags.DEFINE(
        PathParser(), "output", "chart.png", "PNG file to draw the picture in."
    )
    program.run(main, page=__doc__, operands="FILE")
