"""Starts the phases of a verification, and reads what they recorded."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Sequence

from hvdtrain import environment
from hvdtrain.install.commands import InstallError, Steps
from hvdtrain.job import JobError
from hvdtrain.job.launchers import without_launch
from hvdtrain.verify import (
    comparison,
    gradient_norms,
    isolation,
    rank_values,
    samples,
)
from hvdtrain.verify.evidence import Evidence
from hvdtrain.verify.trajectory import Directory, Facts, Phase, PhaseOptions

_WORKER = (sys.executable, "-m", "hvdtrain.verify.worker")
# What launchers put before each piece that they read of the output of a rank.
_PREFIX = re.compile(r"\[(?:\d+,)?(\d+)\]<std(out|err)>:")
_ERROR = re.compile(r"^[\w.]*(Error|Exception): .|^rank \d+ on ")
# The launcher's last line.
_EXIT = re.compile(r"first rank that failed is rank (\d+)[^:]*: exit code")
_STALL_SECONDS = "300"


class PhaseError(JobError):
    """The script failed in a phase: its error, and where its output is.

    Attributes:
        reason: the error alone.
    """

    def __init__(self, reason: str, log: pathlib.Path) -> None:
        super().__init__(f"{reason} Its output is in {log}.")
        self.reason = reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """A script, and how it is verified.

    Attributes:
        command: the script, or `-m` and a module, with its arguments.
        directory: of all files.
        root: a directory with `directory` and all others of the verification.
        size: number of ranks.
        steps: number of steps that are compared.
        dtype: of all computations; None for those of the script.
        divisor: of the gradients in the reference.
    """

    command: Sequence[str]
    directory: pathlib.Path
    root: pathlib.Path
    size: int
    steps: int
    dtype: str | None
    divisor: float = 1.0

    def run(self, phase: Phase, text: str) -> None:
        """Run the script in a phase, and print `text` with the seconds that it took.

        Raises:
            PhaseError: the script failed.
            JobError: the working directory cannot be copied.
        """
        options = PhaseOptions(
            phase=phase,
            directory=str(self.directory),
            size=self.size,
            steps=self.steps * (self.size if phase == "alone" else 1),
            dtype=self.dtype,
            divisor=self.divisor,
        )
        tree = self.directory / f"{phase}.tree"
        launcher = ["horovodrun", "-np", str(self.size)] if phase != "alone" else []
        # Under a launcher's variables the command would join the job as a rank.
        variables = without_launch(os.environ)
        if not launcher:
            # Whatever has started this program.
            variables["HVDTRAIN_ALONE"] = "1"
        variables.setdefault(environment.STALL_SHUTDOWN, _STALL_SECONDS)
        log = self.directory / f"{phase}.log"
        directory = _in_tree(tree, os.getcwd())
        variables["PWD"] = str(directory)
        worker = [*_WORKER, json.dumps(dataclasses.asdict(options))]
        try:
            command = self._command_in(tree, phase)
            Steps(log).run(
                text,
                [*launcher, *worker, *command],
                environment=variables,
                directory=directory,
            )
        except InstallError as error:
            # Of several lines, the first has the exit code, or "timed out".
            reason = str(error).partition("\n")[0]
            if "timed out" not in reason:
                # A rank that stops alone ends the others by an error.
                decision = rank_values.unequal_monitored(self._monitored())
                is_decision = phase == "ranks" and decision
                reason = decision if is_decision else self._failure(phase, log)
            raise PhaseError(reason, log) from None
        finally:
            shutil.rmtree(tree, ignore_errors=True)

    def _failure(self, phase: Phase, log: pathlib.Path) -> str:
        """Return why the script failed: what was wrong first, on any rank."""
        files = self.files(phase)
        ends = {rank: files.read("end", rank) for rank in files.last_numbers("end")}
        failed = [rank for rank in ends if ends[rank].has_failed]
        failed.sort(key=lambda rank: ends[rank].time)
        ended = [rank for rank in ends if rank not in failed]
        found = _EXIT.search(log.read_text(errors="replace"))
        first = int(found[1]) if found else None
        are_in_step = all(ends[rank].is_in_step for rank in failed)
        if 0 < len(ended) < self.size and (are_in_step if failed else first in ended):
            steps = max(files.last_numbers("state", ended[0]), default=0)
            other = next(rank for rank in range(self.size) if rank not in ended)
            return (
                f"Rank {ended[0]} has ended after {steps} steps, and rank {other} in "
                f"step {steps + 1}: give all ranks equally many batches."
            )
        if first is not None and first not in ends:
            # Without an exception, as under `program.run`.
            text = last_error(log, rank=first, is_exit=True)
        elif failed:
            text = last_error(log, rank=failed[0], is_exit=ends[failed[0]].is_exit)
        else:
            text = last_error(log)
        return f"The script failed: {text.rstrip('.')}."

    def _command_in(self, tree: pathlib.Path, phase: Phase) -> list[str]:
        """Make the tree in which a phase runs, and return the command in it."""
        script, *arguments = self.command
        copied = {pathlib.Path.cwd()}
        if script != "-m":
            # The directory may be a link, to which `__file__` would lead.
            path = pathlib.Path(script)
            script = str(path.parent.resolve() / path.name)
            copied |= {pathlib.Path(script).parent}
            script = str(_in_tree(tree, script))
        try:
            unlinked = isolation.make_tree(tree, copied, excluded=self.root.resolve())
        except OSError as error:
            path = error.filename2 or error.filename or tree
            raise JobError(
                f"The working directory cannot be copied to {path}: "
                f"{error.strerror or error}. Set TMPDIR to another directory."
            ) from None
        if phase == "ranks" and unlinked and self.directory == self.root:
            above = ", ".join(map(str, unlinked))
            limit = isolation.MAX_ENTRIES
            print(f"not linked     other files in {above}, with more than {limit}")
        return [script, *(isolation.moved(each, tree, copied) for each in arguments)]

    def files(self, phase: Phase) -> Directory:
        """Return the files of a phase."""
        return Directory(self.directory, phase)

    def compare(self) -> comparison.Comparison:
        """Compare the phases "ranks" and "reference".

        Raises:
            JobError: no step was recorded.
        """
        result = comparison.compare(self.files("ranks"), self.files("reference"))
        if not result.steps:
            raise JobError(
                "Received a script without a step that can be seen; expected steps of "
                "Keras optimizers in model.fit, in model.train_on_batch, or in a "
                "Python loop over a tf.data.Dataset."
            )
        return result

    def samples(self) -> samples.Samples:
        """Return which samples the ranks have read."""
        return samples.read_by_ranks(self.files("ranks"), size=self.size)

    def evidence(self, difference: comparison.Difference) -> Evidence:
        """Return what was recorded about a difference."""
        files, ranks = self.files("ranks"), range(self.size)
        states = [files.read("state", rank, difference.step) for rank in ranks]
        return Evidence(
            difference=difference,
            facts_by_rank=self._facts_by_rank("ranks"),
            reference_by_rank=self._facts_by_rank("reference"),
            samples=self.samples(),
            # A rank with fewer batches than the others has taken fewer steps.
            states_by_rank=[state for state in states if state],
        )

    def _facts_by_rank(self, phase: Phase) -> list[Facts]:
        """Return facts of each rank; for one that has taken no step, of rank 0."""
        files = self.files(phase)
        facts = [files.read("facts", rank) for rank in range(self.size)]
        return [each or facts[0] for each in facts]

    def faults_of_ranks(self, *, are_steps_equal: bool) -> list[str]:
        """Return what is wrong with values of the ranks, beside their steps.

        Args:
            are_steps_equal: whether values are included that are a reason for steps
                which differ.
        """
        files, ranks = self.files("ranks"), range(self.size)
        # A rank that has taken no step has none.
        facts = [each for rank in ranks if (each := files.read("facts", rank))]
        written = [files.read("written", rank) or () for rank in ranks]
        faults = [rank_values.equal_seeds(facts), rank_values.common_files(written)]
        if are_steps_equal:
            faults += [
                rank_values.unequal_learned(facts),
                rank_values.unequal_class_weights(facts),
                rank_values.unequal_monitored(self._monitored()),
            ]
        return [text for text in faults if text]

    def _monitored(self) -> list[rank_values.Monitored]:
        files = self.files("ranks")
        return [files.read("monitored", rank) or {} for rank in range(self.size)]

    def factor_of_size(self) -> float:
        """Return by what the script multiplies gradients because of `hvd.size()`.

        Call it after the phases "reference" and "alone".
        """
        reference = self.files("reference").read("facts", 0)
        alone = self.files("alone").read("facts", 0)
        if not (reference and alone):
            return 1.0
        return gradient_norms.factor_of_size(
            reference.gradients, alone.gradients, size=self.size
        )

    def left_out(self) -> list[str]:
        """Return what of the script is not compared."""
        facts = self.files("ranks").read("facts", 0)
        return [*facts.left_out, "evaluations", "the making of batches", "later steps"]

    def scaling(self) -> dict[str, float]:
        """Return how many times the learning rates are those of one rank, by name.

        The largest number of all steps. A schedule may count steps or samples: the rate
        of a step is compared with that of one rank after equally many steps, and after
        equally many samples, and the smaller number counts.
        """
        scaling: dict[str, float] = {}
        alone, ranks = self.files("alone"), self.files("ranks")
        for step in ranks.last_numbers("state", 0):
            rates = ranks.read("state", 0, step).learning_rates
            singles = [
                state.learning_rates
                for place in (step, step * self.size)
                if (state := alone.read("state", 0, place))
            ]
            for name, rate in rates.items():
                ratios = [rate / each[name] for each in singles if each.get(name)]
                if ratios:
                    scaling[name] = max(min(ratios), scaling.get(name, 0.0))
        return scaling


def _in_tree(tree: pathlib.Path, path: str) -> pathlib.Path:
    return tree / pathlib.Path(path).relative_to("/")


def last_error(
    log: pathlib.Path, *, rank: int | None = None, is_exit: bool = False
) -> str:
    """Return the last error in the output of a launcher, or else its last line.

    Args:
        rank: the rank whose output it is searched for; None for all.
        is_exit: whether the last line is the error.
    """
    streams = _streams(log.read_text(errors="replace"))
    # A process without a launcher has no prefix.
    of_rank = [streams[key] for key in streams if key[0] is not None and key[0] == rank]
    lines = "\n".join(of_rank or streams.values()).splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    errors = [] if is_exit else [line for line in lines if _ERROR.search(line)]
    return (errors or lines or ["it printed nothing."])[-1]


def _streams(text: str) -> dict[tuple[int | None, str], str]:
    """Return what was written, by rank and stream; that of the launcher is last.

    With PYTHONUNBUFFERED=1 Python writes a line in several pieces. The launcher puts a
    prefix before each, and pieces of another rank between them.
    """
    own, *pieces = _PREFIX.split(text)
    streams: dict[tuple[int | None, str], str] = {}
    for rank, name, piece in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        # What follows the end of a line has no prefix: it is the launcher's.
        line, newline, others = piece.partition("\n")
        key = int(rank), name
        streams[key] = streams.get(key, "") + line + newline
        own += others
    # Errors are on the standard error, which is after the output.
    ordered = sorted(streams.items(), key=lambda each: each[0][1], reverse=True)
    return {**dict(ordered), (None, ""): own}
