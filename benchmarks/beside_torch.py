"""Trains real workloads with hvdtrain and with PyTorch, in alternating rounds.

python -m benchmarks.beside_torch --load=gpt2
python -m benchmarks.beside_torch --load=gpt2 --dtype=bfloat16
python -m benchmarks.beside_torch --load=dlrm

Two ranks on this node. Needs torch, and for gpt2 keras-hub. docs/figures/comparisons.md
describes the figures.
"""

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence

from benchmarks import load_options, report, torch_run
from benchmarks.load_options import KERAS_KINDS, TORCH_KINDS, LoadOptions, Run
from hvdtrain import flag_fields, program
from hvdtrain.benchmark import records, tables
from hvdtrain.benchmark.figures import Figures, median_ratio
from hvdtrain.flag_fields import flag_field
from hvdtrain.job import JobError

_RANKS = "2"
_OURS = ("mpirun", "--bind-to", "none", "-np", _RANKS, sys.executable, "-m")
_THEIRS = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *(f"--nproc-per-node={_RANKS}", "-m"),
)
_KINDS = {load: [*KERAS_KINDS[load], *TORCH_KINDS[load]] for load in KERAS_KINDS}
# Runs by kind, one for each round.
Runs = Mapping[str, Sequence[Run]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BesideOptions(LoadOptions):
    """The options of the program. The fields are flags: `--help` describes them."""

    kinds: Sequence[str] = flag_field((), "By default all of the load.")
    rounds: int = flag_field(5, "Of all kinds.", low=1, high=1000)


def main() -> None:
    """Train, print the table, and write the file."""
    options = flag_fields.read_flags(BesideOptions)
    torch_run.check_torch()
    records.check_json(options.json)
    kinds = list(options.kinds or _KINDS[options.load])
    options.check("kinds", kinds, _KINDS)
    runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        # The reverse order in every other round: a drift of the speed cancels.
        for kind in kinds[:: -1 if number % 2 else 1]:
            runs[kind].append(_train(options, kind))
    figures = summarize(runs)
    print(table(figures), flush=True)
    if options.json:
        flags = dataclasses.asdict(options)
        records.write_json(options.json, {"flags": flags, "kinds": figures})


def _train(options: BesideOptions, kind: str) -> Run:
    """Return the figures of a job that trains one kind."""
    is_torch = kind in TORCH_KINDS[options.load]
    launcher, name = (_THEIRS, "torch_run") if is_torch else (_OURS, "keras_run")
    fields = [field.name for field in dataclasses.fields(LoadOptions)]
    given = {field: getattr(options, field) for field in fields}
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "figures.json")
        given |= {"kind": kind, "json": str(path)}
        command = [*launcher, f"benchmarks.{name}"]
        command += [f"--{field}={value}" for field, value in given.items()]
        job = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if job.returncode:
            raise JobError(f"{' '.join(command)} ended with {job.returncode}.")
        return Run(**json.loads(path.read_text()))


def summarize(runs: Runs) -> dict[str, Figures]:
    """Return the figures of each kind.

    Returns:
        By kind, the median `samples_per_second`, those of all `rounds`, the median over
        rounds of the largest `peak_resident` of a rank, the `parameters` of each rank,
        and, by PyTorch's kind, the medians of the ratios of paired rounds: `speed` and
        `memory`.
    """
    speeds = {
        kind: [run.samples_per_second for run in each] for kind, each in runs.items()
    }
    peaks = {
        kind: [max(run.peak_resident) for run in each] for kind, each in runs.items()
    }
    torch = _of_torch(runs)
    return {
        kind: {
            "samples_per_second": statistics.median(speeds[kind]),
            "rounds": speeds[kind],
            "peak_resident": statistics.median(peaks[kind]),
            "parameters": each[0].parameters,
            "speed": _ratios(speeds, kind, torch),
            "memory": _ratios(peaks, kind, torch),
        }
        for kind, each in runs.items()
    }


def _of_torch(kinds: Iterable[str]) -> list[str]:
    of_torch = set().union(*TORCH_KINDS.values())
    return [kind for kind in kinds if kind in of_torch]


def _ratios(
    values: Mapping[str, Sequence[float]], kind: str, others: Iterable[str]
) -> dict[str, float]:
    return {other: median_ratio(values[kind], values[other]) for other in others}


def table(figures: Mapping[str, Figures]) -> str:
    """Return the table of the figures of all kinds."""
    others = _of_torch(figures)
    heads = ["samples/s", "parameters", "peak resident"]
    heads += [f"speed, memory / {kind}" for kind in others]
    lines = [report.line(f"{'':<12}", heads)]
    for kind, each in figures.items():
        cells = [
            f"{each['samples_per_second']:,.1f}",
            f"{max(each['parameters']):,}",
            tables.size_text(each["peak_resident"]),
            *(f"{each['speed'][o]:.2f}, {each['memory'][o]:.2f}" for o in others),
        ]
        lines.append(report.line(f"{kind:<12}", cells))
    return "\n".join(lines)


if __name__ == "__main__":
    flag_fields.define_flags(BesideOptions, [*load_options.CHECKS])
    program.run(main, page=__doc__)
