"""Finds out why training does not work here, and what to do about it, on one page.

python -m hvdtrain.doctor
python -m hvdtrain.doctor --hosts=node1,node2
python -m hvdtrain.doctor --json
python -m hvdtrain.doctor --job=MODEL_DIR

Takes half a minute. The exit code is 1 if something is broken.

With --job, prints where each rank of a job is that runs, or was when it ended, and the
first collective on which its ranks differ.
"""

import dataclasses
import json
import textwrap
from collections.abc import Callable

from absl import flags

from hvdtrain import __version__, program
from hvdtrain.doctor import cluster, installation, machine, ranks, roll
from hvdtrain.doctor.finding import Finding
from hvdtrain.job import JobError, launchers

_HOSTS = flags.DEFINE_list("hosts", [], "Other hosts of the job, checked by ssh.")
_SSH_PORT = flags.DEFINE_integer(
    "ssh_port", 22, "The port of their sshd.", lower_bound=1, upper_bound=65535
)
_JSON = flags.DEFINE_bool("json", False, "Print the findings as JSON.")
_JOB = flags.DEFINE_string(
    "job",
    None,
    "The model_dir of a job that hangs or has lost a rank, or the directory with its "
    "records that it has printed. Prints what its ranks do; checks nothing else.",
)
_VERSION = flags.DEFINE_bool("version", False, "Print hvdtrain's version alone.")

_MARKS = {"fine": "   ", "warning": " ? ", "broken": "!! "}
_WIDTH = 88


def main() -> None:
    """Print the findings; raise `JobError` if something is broken."""
    if _VERSION.value:
        print(__version__)
        return
    if _JOB.value is not None:
        print(roll.report(_JOB.value))
        return
    launched = launchers.launch()
    if launched.size > 1:
        raise JobError(
            f"Received {launched.size} ranks from {launched.launcher}; expected none: "
            "start python -m hvdtrain.doctor alone, it starts two ranks of its own."
        )
    checks: list[Callable[[], list[Finding]]] = [
        installation.check,
        machine.check,
        lambda: cluster.check(_HOSTS.value, ssh_port=_SSH_PORT.value),
        ranks.check,
    ]
    findings = []
    for check in checks:
        for finding in check():
            findings.append(finding)
            # At once: the checks take half a minute.
            if not _JSON.value:
                print(_text(finding))
    broken = [finding for finding in findings if finding.status == "broken"]
    if _JSON.value:
        listed = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"broken": len(broken), "findings": listed}, indent=2))
    if broken:
        topics = ", ".join(finding.topic for finding in broken)
        raise JobError(f"{len(broken)} broken: {topics}.")
    if not _JSON.value:
        print("Nothing is broken.")


def _text(finding: Finding) -> str:
    indent = " " * 20
    lines = textwrap.wrap(
        f"{_MARKS[finding.status]}{finding.topic:<16} {finding.detail}",
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    if finding.remedy:
        lines += textwrap.wrap(
            f"-> {finding.remedy}",
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=indent + "   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


if __name__ == "__main__":
    program.run(main, page=__doc__)
