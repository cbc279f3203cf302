"""The tables of the programs of this directory."""

from collections.abc import Iterable

from hvdtrain.benchmark import tables

_CELL_WIDTH = 24


def head(result: tables.Result, *rows: tables.Row) -> list[str]:
    """Return the first lines of a table: the machine, other rows, and doubts."""
    return tables.label_rows(
        [*tables.environment_rows(result), *rows, *tables.doubt_rows(result)]
    )


def line(label: str, cells: Iterable[str]) -> str:
    """Return a line of a table."""
    return label + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells)
