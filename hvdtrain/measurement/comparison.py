"""A table of several results, each from the JSON file of a benchmark."""

from hvdtrain.job import JobError
from hvdtrain.measurement.tables import (
    NOT_MEASURED,
    measured_parts,
    milliseconds,
    number,
    size_text,
)

# Of the JSON files: to be increased when a figure changes its name or its meaning.
FORMAT = 2
_WIDTH = 22


def table(results):
    """Return the table, one column for each result.

    Args:
        results: dicts of `running.run`, by the path of their file.

    Raises:
        JobError: a file has other contents.
    """
    columns = [_column_of_file(*item) for item in results.items()]
    return "\n".join(
        f"{label:<{_WIDTH}}"
        + "".join(f"{column[label]:>{_WIDTH}}" for column in columns)
        for label in columns[0]
    )


def _column_of_file(path, result):
    try:
        if result["format"] == FORMAT:
            return _column(result)
    # Of other contents: the table is their only schema.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        pass
    raise JobError(
        f"Received --compare with {path}; expected a file that --json wrote for a "
        "training in this version."
    )


def _column(result):
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


def _difference(figures):
    if "consistency" not in figures:
        return NOT_MEASURED
    return f"{figures['consistency']['largest_difference']:.1e}"
