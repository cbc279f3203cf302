"""Draws the course of trainings, and prints what they cost, from their log.jsonl.

python -m hvdtrain.report runs/a
python -m hvdtrain.report --output=two.png runs/a runs/b

Arguments: one or more directories that hvdtrain.mnist received as --model_dir. They are
only read, also while their jobs run. The picture needs matplotlib.

The table counts all starts of a job. running time: from each start to the last line of
the log, with tracing, evaluation and checkpoints. steps alone: without them. steps
repeated: taken again after a restart from a checkpoint. late rank: the rank that
delayed the others most, and by which share of the time for which cause. best: the
evaluation with the lowest loss.

The line "productive" divides the wall time by cause: the running time, the start of the
first process, and the time between a kill and the next start.
"""

import importlib

from absl import flags

from hvdtrain import program
from hvdtrain.flag_fields import PathParser
from hvdtrain.job.files import atomic_write, check_picture, writing_output
from hvdtrain.report import goodput, runs, table

_OUTPUT = flags.DEFINE(
    PathParser(), "output", "report.png", "PNG file to draw the curves in."
)


def main(directories: list[str]) -> None:
    """Print the table, then draw the picture."""
    logged_runs = runs.read(directories)
    print(table.table(logged_runs), flush=True)
    print()
    for run in logged_runs:
        text = goodput.goodput_text(goodput.compute_goodput(run.lines))
        print(f"{run.name}: {text}" if len(logged_runs) > 1 else text, flush=True)
    path = _OUTPUT.value
    check_picture(path, "--output")
    # Not at the top: it loads matplotlib, an extra that the table does not need.
    plotting = importlib.import_module("hvdtrain.report.plotting")
    with writing_output(path, "--output"), atomic_write(path) as temporary:
        plotting.draw(logged_runs, temporary)
    print(f"written to {path}", flush=True)


if __name__ == "__main__":
    program.run(main, page=__doc__, operands="MODEL_DIR")
