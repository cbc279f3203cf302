"""The CPU quotas of control groups, as containers have them."""

import contextlib
import pathlib


def quotas(root="/sys/fs/cgroup", membership="/proc/self/cgroup"):
    """Return the CPU quotas, in cores, of this process' control groups, v1 or v2."""
    try:
        lines = pathlib.Path(membership).read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = pathlib.Path(root) / ("cpu" if controllers else "")
        inside = pathlib.PurePath(path.lstrip("/"))
        # In a container the path may be the host's, which does not exist here. The
        # group of the container is then mounted at the root.
        for part in (inside, *inside.parents):
            found += _quota(base / part)
    return found


def _quota(directory):
    with contextlib.suppress(OSError, ValueError):
        quota, period = (directory / "cpu.max").read_text().split()
        return [] if quota == "max" else [int(quota) / int(period)]
    with contextlib.suppress(OSError, ValueError):
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        period = int((directory / "cpu.cfs_period_us").read_text())
        return [quota / period] if quota > 0 else []
    return []
