"""Measures the time of an allreduce by its size, on each path that a job has.

mpirun -np 2 python -m benchmarks.allreduce
horovodrun --gloo -np 2 python -m benchmarks.allreduce --torch --json=gloo.json

docs/figures/comparisons.md describes the paths.
"""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from benchmarks import mpi, report, torch_run
from hvdtrain import environment, flag_fields, job, program
from hvdtrain.benchmark import records
from hvdtrain.benchmark.benchmark_options import SECONDS_CHECK
from hvdtrain.flag_fields import FlagCheck, flag_field, path_field
from hvdtrain.job import launchers
from hvdtrain.job.world import SharedJobError

_FIRST_BYTES, _FACTOR, _MOST_BYTES = 1000, 4, 4_000_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllreduceOptions:
    """The options of the program. The fields are flags: `--help` describes them."""

    max_bytes: int = flag_field(
        256_000_000,
        "Largest message, unless --sizes lists them.",
        low=4000,
        high=_MOST_BYTES,
    )
    sizes: Sequence[str] = flag_field(
        (),
        "Bytes of the messages, such as 1000,64000, in place of --max_bytes.",
    )
    rounds: int = flag_field(7, "Rounds of all paths.", low=1, high=10_000)
    seconds: float = flag_field(0.1, "Of each path in a round.", low=0, high=120)
    torch: bool = flag_field(False, "Also PyTorch's Gloo. Needs the package torch.")
    seed: int = flag_field(0, "Of the job.", low=0, high=2**32 - 1)
    json: str | None = path_field("File to write the figures to.")

    @property
    def message_sizes(self) -> list[int]:
        """The bytes of the messages: `sizes`, or 1 kB, 4 kB, ..., and the largest.

        Multiples of 4, the bytes of a float32.
        """
        if self.sizes:
            return [int(size) // 4 * 4 for size in self.sizes]
        sizes, last = [_FIRST_BYTES], self.max_bytes // 4 * 4
        while sizes[-1] * _FACTOR < last:
            sizes.append(sizes[-1] * _FACTOR)
        return [*sizes, last]


SIZES_CHECK = FlagCheck(
    lambda sizes: all(
        size.isdecimal() and 4 <= int(size) <= _MOST_BYTES for size in sizes
    ),
    f"expected numbers of bytes from 4 to {_MOST_BYTES}",
)


def main() -> None:
    """Measure, print the table, and write the file."""
    options = flag_fields.read_flags(AllreduceOptions)
    if launchers.launch().size == 1:
        raise SharedJobError(
            "Received a job of 1 rank; expected 2 or more: start it by horovodrun -np "
            "2 or mpirun -np 2."
        )
    if options.torch:
        torch_run.check_torch()
    records.check_json(options.json)
    environment.set_default_stall_limits(environment.BENCHMARK_LIMITS)
    mpi_seconds = mpi.measure(
        options.message_sizes, rounds=options.rounds, seconds=options.seconds
    )
    world = job.start(seed=options.seed)
    # Not at the top: TensorFlow and Horovod read their environment at the import, and
    # `start` sets it.
    from benchmarks import allreduce_paths
    from hvdtrain.benchmark import conditions

    result = conditions.describe(world, dataclasses.asdict(options))
    with contextlib.ExitStack() as stack:
        peers = {}
        if options.torch:
            torch_allreduce = _import_torch_path()
            peers["PyTorch"] = stack.enter_context(torch_allreduce.connected(world))
            result["versions"]["PyTorch"] = torch_allreduce.VERSION
        rows = allreduce_paths.measure(
            world,
            options.message_sizes,
            peers,
            rounds=options.rounds,
            seconds=options.seconds,
        )
    for row in rows:
        if mpi_seconds:
            row["seconds"] = {"MPI": mpi_seconds[row["bytes"]], **row["seconds"]}
    result["collectives"] = {"rows": rows}
    conditions.report(world, result, table(result), path=options.json)


def _import_torch_path() -> ModuleType:
    # PyTorch warns of addresses without a name, and reads this at its import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Not at the top: PyTorch may not be installed.
    from benchmarks import torch_allreduce

    return torch_allreduce


def table(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    size, rows = result["size"], result["collectives"]["rows"]
    lines = [
        *report.head(result),
        "",
        f"allreduce of float32 over {size} ranks: time, and bytes x 2 (N-1)/N",
        "copy: each rank copies as many bytes in memory, all at once",
        report.line(f"{'bytes':>12}", rows[0]["seconds"]),
    ]
    for row in rows:
        sent = sent_bytes(row["bytes"], size)
        cells = [
            f"{_time(seconds)}{sent / seconds / 1e9:7.2f} GB/s"
            for seconds in row["seconds"].values()
        ]
        lines.append(report.line(f"{row['bytes']:>12,}", cells))
    return "\n".join(lines)


def sent_bytes(count: int, size: int) -> float:
    """Return what each rank sends at least in an allreduce of `count` bytes."""
    return 2 * (size - 1) / size * count


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:7.1f} us"
    return f"{1e3 * seconds:7.1f} ms"


if __name__ == "__main__":
    flag_fields.define_flags(AllreduceOptions, [SECONDS_CHECK, SIZES_CHECK])
    program.run(main, page=__doc__)
