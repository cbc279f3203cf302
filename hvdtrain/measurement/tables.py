"""The figures as text."""

_LABEL = 15


def training(result):
    """Return the table of a result of `throughput.measure`.

    Args:
        result: its dict, with that of `hvdtrain.report.describe` and the flags.
    """
    size, figures = result["size"], result["figures"]
    rows = [
        *_head(result),
        *_speed(figures),
        *_split(figures),
        *_one_rank(figures["one_rank"], size),
        *_resources(figures),
    ]
    return "\n".join(f"{label:<{_LABEL}}{text}" for label, text in rows)


def _head(result):
    flags, figures = result["flags"], result["figures"]
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    hosts = ", ".join(f"{count} on {host}" for host, count in result["hosts"].items())
    threads = " or ".join(str(n) for n in sorted(set(result["threads"])))
    yield "versions", versions
    yield "ranks", f"{hosts}; {result['path']}; threads per rank: {threads}"
    yield "workload", f"{flags['workload']}; data: {figures['data']}"
    yield (
        "batch",
        f"{flags['batch_size']} per rank; {flags['steps_per_execution']} steps per "
        f"execution; {flags['rounds']} rounds of {flags['seconds']:g} s per variant",
    )
    if figures["warning"]:
        yield "WARNING", figures["warning"]


def _speed(figures):
    by_rank = figures["samples_per_second_by_rank"]
    per_rank = ", ".join(f"{speed:,.0f}" for speed in by_rank[:8])
    more = ", ..." if len(by_rank) > 8 else ""
    yield (
        "speed",
        f"{figures['samples_per_second']:,.0f} samples/s; by rank {per_rank}{more}",
    )
    times = figures["step_seconds"]
    yield (
        "step",
        f"mean {milliseconds(times['mean'])}, p50 {milliseconds(times['p50'])}, "
        f"p90 {milliseconds(times['p90'])}, p99 {milliseconds(times['p99'])}",
    )


def _split(figures):
    parts = figures["split_seconds"]
    notes = {
        "compute": "forward and backward pass, update",
        "communication": f"not hidden; {size_text(figures['reduced_bytes'])} reduced",
        "overhead": "of fit, callbacks, Python",
        "input_wait": "for the input pipeline",
    }
    for name, note in notes.items():
        share = parts[name] / parts["step"]
        yield (
            f"  {name.replace('_', ' ')}",
            f"{milliseconds(parts[name]):>9} {share:6.1%}  {note}",
        )


def _one_rank(figures, size):
    if size > 1:
        yield (
            "one rank",
            f"{figures['samples_per_second']:,.0f} samples/s; {size} ranks are "
            f"{figures['speedup']:.2f} times as fast, efficiency "
            f"{figures['efficiency']:.2f}",
        )
    text = (
        f"{figures['bare_samples_per_second']:,.0f} samples/s; one rank has "
        f"{figures['against_bare']:.2f} of it"
    )
    if size > 1:
        text += f", {size} ranks {figures['all_ranks_against_bare']:.2f}"
    yield "bare Keras", text


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


def milliseconds(seconds):
    """Return seconds as text in milliseconds, with three significant digits."""
    value = 1000 * seconds
    digits = 3 if abs(value) < 10 else 1
    return f"{value:,.{digits}f} ms"


def size_text(count):
    """Return a number of bytes as text, in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
