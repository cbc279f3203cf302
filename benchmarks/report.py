"""What the programs of this directory share: their table and their file."""

from collections.abc import Iterable

from hvdtrain.benchmark import tables
from hvdtrain.job import launchers
from hvdtrain.job.files import check_output

_CELL_WIDTH = 24


def check_json(path: str | None) -> None:
    """Raise a `JobError` on rank 0 if the file of --json cannot be written."""
    if path and launchers.launch().rank == 0:
        check_output(path, "--json")


def head(result: tables.Result, *rows: tables.Row) -> list[str]:
    """Return the first lines of a table: the machine, other rows, and doubts."""
    return tables.label_rows(
        [*tables.environment_rows(result), *rows, *tables.doubt_rows(result)]
    )


def line(label: str, cells: Iterable[str]) -> str:
    """Return a line of a table."""
    return label + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells)
