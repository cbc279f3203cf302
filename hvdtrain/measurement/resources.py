"""Memory of a process, and the time since its command was started."""

import os
import pathlib
import resource
import time

from hvdtrain.job import launchers

# Starts the processes of a job step in a job that may have run for long: it counts only
# where there is no other launcher.
_SCHEDULERS_PROCESS = "slurmstepd"


def memory():
    """Return the memory of this process, in bytes.

    `peak_resident` is the largest resident set so far. `proportional` is the resident
    set of now with each shared page divided by the processes that map it: it adds up
    over the ranks of a node.
    """
    found = {"peak_resident": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    try:
        lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:  # kernels before 4.14, and some containers
        return found
    sizes = dict(line.split(":", 1) for line in lines[1:])
    return {**found, "proportional": 1024 * int(sizes["Pss"].split()[0])}


def seconds_since_command():
    """Return the seconds since the start of the command that started this process.

    The command is the outermost launcher among the ancestors of this process, or this
    process if there is none. Where a launcher started this process through a daemon on
    another host, it is that daemon.
    """
    _, _, command_started = launchers.process(os.getpid())
    found = ""
    for name, _, started in launchers.ancestors():
        is_launcher = name in launchers.PROCESSES
        if is_launcher and not (found and name == _SCHEDULERS_PROCESS):
            found, command_started = name, started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - command_started
