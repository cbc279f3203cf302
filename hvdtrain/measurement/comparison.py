"""A table of several results, each from the JSON file of a benchmark."""

from collections.abc import Mapping
from typing import Any

from hvdtrain.job import JobError
from hvdtrain.measurement.tables import (
    NOT_MEASURED,
    measured_parts,
    milliseconds,
    number,
    size_text,
)

# Version of the JSON files: increase it when a figure changes its name or its meaning.
FORMAT = 2
_WIDTH = 22


def table(results: Mapping[str, Any]) -> str:
    """Return the table, one column for each result.

    Args:
        results: contents of JSON files, by path.

    Raises:
        JobError: a file was not written by `--json` of this version for a training.
    """
    columns = [_read_column(path, result) for path, result in results.items()]
    return "\n".join(
        f"{label:<{_WIDTH}}"
        + "".join(f"{column[label]:>{_WIDTH}}" for column in columns)
        for label in columns[0]
    )


def _read_column(path: str, result: Any) -> dict[str, str]:
    try:
        if result["format"] == FORMAT:
            return _column(result)
    # The keys that `_column` reads are the only schema of these files.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        pass
    raise JobError(
        f"Received --compare with {path}; expected a file that --json wrote for a "
        "training in this version."
    )


def _column(result: Mapping[str, Any]) -> dict[str, str]:
    flags, figures = result["flags"], result["figures"]
    parts, one = measured_parts(figures), figures["one_rank"]
    has_several = figures["devices"] > 1
    memory = figures["memory"]
    shares = [each.get("proportional", each["peak_resident"]) for each in memory]
    return {
        "strategy": flags["strategy"],
        "workload": flags["workload"],
        "processes x devices": f"{result['size']} x "
        f"{figures['devices'] // result['size']}",
        "batch": f"{flags['batch_size'] * figures['devices']}",
        "path": result["path"],
        "samples/s": number(figures["samples_per_second"]),
        "against one": f"{one['speedup']:.2f}" if has_several else NOT_MEASURED,
        "step": milliseconds(parts["step"]),
        "communication": milliseconds(parts["communication"]),
        "reduced": size_text(figures["reduced_bytes"]),
        "load balance": f"{figures['load_balance']:.2f}"
        if has_several
        else NOT_MEASURED,
        "memory, all": size_text(sum(shares)),
        "memory, largest peak": size_text(
            max(each["peak_resident"] for each in memory)
        ),
        "largest difference": _difference(figures),
    }


def _difference(figures: Mapping[str, Any]) -> str:
    if "consistency" not in figures:
        return NOT_MEASURED
    return f"{figures['consistency']['largest_difference']:.1e}"
