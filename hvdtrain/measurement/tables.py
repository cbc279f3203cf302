"""The figures as text."""

NOT_MEASURED = "-"
# Fewer, and a median is no protection against one slow round.
_MIN_ROUNDS = 3
_LABEL = 15


def training(result):
    """Return the table of a result of `throughput.measure`.

    Args:
        result: its dict, with that of `hvdtrain.description.describe` and the flags.
    """
    size, figures = result["size"], result["figures"]
    rows = [
        *head(result),
        *_workload(result["flags"], figures),
        *_speed(figures),
        *_split(figures),
        *doubts(result),
        *_doubts_of_parts(figures),
        *_one_rank(figures["one_rank"], figures["devices"], size),
        *_comparison(figures, result),
        *_resources(figures),
    ]
    return "\n".join(labelled(rows))


def collectives(result):
    """Return the table of a result with collectives.

    Args:
        result: a dict with that of `hvdtrain.description.describe` and the measured
            rows.
    """
    size, measured = result["size"], result["collectives"]
    names = list(measured["rows"][0]["seconds"])
    lines = labelled(head(result))
    lines += [
        "",
        f"allreduce of float32 over {size} ranks: time, and bytes x 2 (N-1)/N",
    ]
    lines.append("copy: each rank copies as many bytes in memory, all at once")
    lines.append(f"{'bytes':>12}" + "".join(f"{name:>24}" for name in names))
    for row in measured["rows"]:
        moved = 2 * (size - 1) / size * row["bytes"]
        cells = [
            f"{_time(seconds)}{moved / seconds / 1e9:7.2f} GB/s"
            for seconds in row["seconds"].values()
        ]
        lines.append(f"{row['bytes']:>12,}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def labelled(rows):
    """Return lines of pairs of a label and a text."""
    return [f"{label:<{_LABEL}}{text}" for label, text in rows]


def head(result):
    """Yield the rows that all tables begin with."""
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    hosts = ", ".join(f"{count} on {host}" for host, count in result["hosts"].items())
    threads = " or ".join(str(n) for n in sorted(set(result["threads"])))
    path = result["path"]
    if result["size"] > 1:
        path = f"{result['controller']}; reduction: {path}"
    yield "versions", versions
    yield "ranks", f"{hosts}; {path}; threads per rank: {threads}"
    yield "machine", f"{result['machine']}; load average {result['load_average']:.1f}"


def _workload(flags, figures):
    yield (
        "workload",
        f"{flags['workload']}, {flags['strategy']}; data: {figures['data']}",
    )
    yield (
        "batch",
        f"{flags['batch_size']} per rank; {flags['steps_per_execution']} steps per "
        f"execution; {flags['rounds']} rounds of {flags['seconds']:g} s per variant",
    )
    if figures["warning"]:
        yield "WARNING", figures["warning"]


def doubts(result):
    """Yield rows of what makes the figures of all tables less than certain."""
    flags = result["flags"]
    threads, load = sum(result["threads"]), result["load_average"]
    if load > threads:
        yield (
            "WARNING",
            f"the load average before was {load:.1f}, and the ranks have {threads} "
            "threads: other programs disturb the figures",
        )
    if flags["rounds"] < _MIN_ROUNDS:
        yield (
            "WARNING",
            f"fewer than {_MIN_ROUNDS} rounds: medians do not exclude a slow one; use "
            "more --rounds",
        )


def _doubts_of_parts(figures):
    if min(figures["split_seconds"].values()) < 0:
        yield (
            "WARNING",
            "a part of the step is negative: it is smaller than the noise of this "
            "machine; use more --rounds",
        )


def _speed(figures):
    by_rank = figures["samples_per_second_by_rank"]
    per_rank = ", ".join(number(speed) for speed in by_rank[:8])
    more = ", ..." if len(by_rank) > 8 else ""
    yield (
        "speed",
        f"{number(figures['samples_per_second'])} samples/s; by rank {per_rank}{more}",
    )
    times = figures["step_seconds"]
    yield (
        "step",
        f"mean {milliseconds(times['mean'])}, p50 {milliseconds(times['p50'])}, "
        f"p90 {milliseconds(times['p90'])}, p99 {milliseconds(times['p99'])}",
    )


def measured_parts(figures):
    """Return the seconds of a step and its parts, None for those not measured.

    Without a variant of its own, a part is zero by construction.
    """
    variants = figures["rounds"]["step_seconds_by_rank"][0]
    needed = {"communication": "local", "input_wait": "constant"}
    return {
        name: seconds if needed.get(name, name) in {name, *variants} else None
        for name, seconds in figures["split_seconds"].items()
    }


def _split(figures):
    parts = measured_parts(figures)
    notes = {
        "compute": "forward and backward pass, update",
        "communication": f"not hidden; {size_text(figures['reduced_bytes'])} reduced",
        "overhead": "of fit, callbacks, Python",
        "input_wait": "for the input pipeline",
    }
    for name, note in notes.items():
        seconds, share = parts[name], NOT_MEASURED
        if seconds is not None:
            share = f"{seconds / parts['step']:.1%}"
        yield (
            f"  {name.replace('_', ' ')}",
            f"{milliseconds(seconds):>11} {share:>7}  {note}",
        )


def _one_rank(figures, count, size):
    unit = "rank" if size == count else "device"
    if count > 1:
        yield (
            f"one {unit}",
            f"{number(figures['samples_per_second'])} samples/s; {count} {unit}s are "
            f"{figures['speedup']:.2f} times as fast, efficiency "
            f"{figures['efficiency']:.2f}",
        )
    text = (
        f"{number(figures['bare_samples_per_second'])} samples/s; one {unit} has "
        f"{figures['against_bare']:.2f} of it"
    )
    if count > 1:
        text += f", {count} {unit}s {figures['all_ranks_against_bare']:.2f}"
    yield "bare Keras", text


def _comparison(figures, result):
    if "consistency" in figures:
        found = figures["consistency"]
        equal = "equal to the bit" if found["ranks_are_equal"] else "DIFFERENT"
        ranks = f"; ranks are {equal}" if result["size"] > 1 else ""
        yield (
            "consistency",
            f"weights after {found['steps']} steps differ by "
            f"{found['largest_difference']:.1e} from one process{ranks}",
        )
    if figures["reduced_bytes"]:
        yield "load balance", f"mean over maximum {figures['load_balance']:.2f}"


def _resources(figures):
    peak = max(each["peak_resident"] for each in figures["memory"])
    text = f"peak of a rank {size_text(peak)}"
    shares = [each.get("proportional") for each in figures["memory"]]
    if all(shares):
        text += f"; PSS of all ranks {size_text(sum(shares))}"
    yield "memory", text
    start = figures["start_up"]
    yield (
        "start-up",
        f"{start['seconds']:.1f} s from {start['command']} to the first step",
    )


def _time(seconds):
    if seconds < 1e-3:
        return f"{1e6 * seconds:7.1f} us"
    return f"{1e3 * seconds:7.1f} ms"


def milliseconds(seconds):
    """Return seconds as text in milliseconds, three decimals below 10 and else one.

    None is `NOT_MEASURED`.
    """
    if seconds is None:
        return NOT_MEASURED
    value = 1000 * seconds
    digits = 3 if abs(value) < 10 else 1
    return f"{value:,.{digits}f} ms"


def number(value):
    """Return a number as text, with three significant digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size_text(count):
    """Return a number of bytes as text, in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


_WIDTH = 22


def table(result):
    """Return the table of a result of `parallelism.measure`.

    Args:
        result: a dict of it, with that of `hvdtrain.description.describe` and the
            flags.
    """
    flags = result["flags"]
    workload = flags["workload"]
    if workload == "recommender":
        tables = ", ".join(f"{int(rows):,}" for rows in flags["tables"])
        workload += f"; tables of {flags['columns']} columns and {tables} rows"
        workload += f"; {', '.join([*flags['units'], '1'])} units"
    rows = [
        *head(result),
        ("workload", f"{workload}; {flags['optimizer']}"),
        (
            "batch",
            f"{flags['batch_size']} per rank; {flags['steps_per_execution']} steps per "
            f"execution; {flags['rounds']} rounds of {flags['seconds']:g} s per kind",
        ),
        *doubts(result),
    ]
    lines = [*labelled(rows), "", "the most of a rank, and how many times replicated"]
    lines.append(_line("", ("weights and slots", "sent in a step", "step", "loss")))
    lines += [_line(name, _cells(each)) for name, each in result["parallelism"].items()]
    return "\n".join(lines)


def _cells(figures):
    ratios = figures["against_replicated"]
    texts = {
        "memory": size_text(largest_memory(figures)),
        "sent_bytes": size_text(max(figures["sent_bytes_by_rank"])),
        "step_seconds": milliseconds(figures["step_seconds"]),
    }
    cells = [f"{text} {ratios[name]:7.3f}" for name, text in texts.items()]
    return [*cells, f"{figures['loss']:.6f}"]


def largest_memory(figures):
    """Return the bytes of weights and slots of the rank with most of them.

    Args:
        figures: those of a kind, of `parallelism.measure`.
    """
    weights, slots = figures["weight_bytes_by_rank"], figures["slot_bytes_by_rank"]
    return max(map(sum, zip(weights, slots, strict=True)))


def _line(name, cells):
    return f"{name:<12}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells)
