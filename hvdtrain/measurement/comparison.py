"""A table of several results, each from the JSON file of a benchmark."""

from hvdtrain.job import JobError
from hvdtrain.measurement.tables import milliseconds, number, size_text

# Of the JSON files: to be increased when a figure changes its name or its meaning.
FORMAT = 1
_WIDTH = 22


def table(results):
    """Return the table, one column for each result.

    Args:
        results: dicts of `running.run`, by the path of their file.

    Raises:
        JobError: a file has other contents.
    """
    for path, result in results.items():
        if result.get("format") != FORMAT or "figures" not in result:
            raise JobError(
                f"Received --compare with {path}; expected a file that --json wrote "
                "for a training in this version."
            )
    columns = [_column(result) for result in results.values()]
    return "\n".join(
        f"{label:<{_WIDTH}}"
        + "".join(f"{column[label]:>{_WIDTH}}" for column in columns)
        for label in columns[0]
    )


def _column(result):
    flags, figures = result["flags"], result["figures"]
    parts, one = figures["split_seconds"], figures["one_rank"]
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
        "against one": f"{one['speedup']:.2f}",
        "step": milliseconds(parts["step"]),
        "communication": milliseconds(parts["communication"]),
        "reduced": size_text(figures["reduced_bytes"]),
        "load balance": f"{figures['load_balance']:.2f}",
        "memory, all": size_text(sum(shares)),
        "memory, largest peak": size_text(
            max(each["peak_resident"] for each in memory)
        ),
        "largest difference": _difference(figures),
    }


def _difference(figures):
    if "consistency" not in figures:
        return "-"
    return f"{figures['consistency']['largest_difference']:.1e}"
