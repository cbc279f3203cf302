"""Checks that N ranks compute what one process computes, for a script of your own.

python -m hvdtrain.verify -np 2 train.py --epochs=3
python -m hvdtrain.verify -np 2 -m hvdtrain.mnist --dataset=digits

The script is not changed. It runs for some steps on N ranks, then again with the
batches of all ranks on each and without any reduction, which is what one process with
the N-times batch computes. Weights, optimizer and metrics are compared after each step.
If they differ, the first difference and its likely reason are printed, and the exit
code is 1. What is not compared is printed as well. Takes as long as three starts of the
script, or five if a difference is compared again in float64.
"""

import dataclasses
import functools
import pathlib
import shutil
import sys
import tempfile

from absl import flags

from hvdtrain import interruption, program
from hvdtrain.install import commands
from hvdtrain.job import JobError, launchers, signals
from hvdtrain.verify import causes
from hvdtrain.verify.comparison import Comparison, Difference
from hvdtrain.verify.phases import PhaseError, Verification
from hvdtrain.verify.samples import Samples

_NP = flags.DEFINE_integer("np", 2, "Number of ranks.", lower_bound=2)
_STEPS = flags.DEFINE_integer(
    "steps", 10, "Number of steps that are compared.", lower_bound=1
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "float64"],
    "Dtype of all computations. By default the script's own; a difference without a "
    "known reason is compared again in float64, to rule out rounding.",
)
_KEEP = flags.DEFINE_bool("keep", False, "Keep the recorded files.")

# How much more than N times that of one rank a learning rate may be: a schedule may
# round its numbers of steps. A rate that is scaled twice is N * N times that.
_SCALING_TOLERANCE = 1.2
_NO_REASON = (
    "None of the reasons was found that leave a trace. One that leaves none is a loss "
    "or a layer that combines the samples of a batch, such as a contrastive loss, or "
    "that divides by the number of valid ones: compute it of hvd.allgather(...). The "
    'documents list the conditions: "When N ranks equal one process".'
)
_CUT_SHORT = ": this model multiplies rounding, which is too large in later steps"
_NO_FLOAT64 = "It may be rounding: the comparison in float64 was not possible."


def main(command: list[str]) -> None:
    """Verify a script; raise `JobError` if it fails or differs."""
    if launchers.launch().size > 1:
        raise JobError(
            "Received a launcher; expected none: start python -m hvdtrain.verify "
            "alone, it starts the ranks."
        )
    if command[0] != "-m" and not pathlib.Path(command[0]).is_file():
        raise JobError(f"Received {command[0]}; expected a Python script.")
    directory = pathlib.Path(tempfile.mkdtemp(prefix="hvdtrain-verify-"))

    def abort(number: int) -> bool:
        commands.abort()
        shutil.rmtree(directory, ignore_errors=True)
        # Not handled: the process ends as programs do.
        return False

    signals.subscribe(interruption.SIGNALS, abort)
    verification = Verification(
        command=command,
        directory=directory,
        root=directory,
        size=_NP.value,
        steps=_STEPS.value,
        dtype=_DTYPE.value,
    )
    is_kept = _KEEP.value
    try:
        faults = _verify(verification)
    except PhaseError:
        # The error has the path of the script's output.
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(directory, ignore_errors=True)
    if is_kept:
        print(f"files          {directory}")
    if faults:
        raise JobError("\n".join(faults))


def _verify(verification: Verification) -> list[str]:
    """Run the phases and print what they show; return what is wrong."""
    compared = _run_and_compare(verification)
    alone = Alone(verification)
    if compared.first and _may_be_scaled(verification, compared.first):
        factor = alone.factor_of_size()
        if factor != 1:
            # A mean over ranks of N times the sum, say, which may be right.
            verification = dataclasses.replace(verification, divisor=factor)
            compared = _compare_with_reference(verification)
    rounding = []
    if compared.first and _may_be_rounding(verification, compared.first):
        print(f"repeated in float64: {_describe(compared.first)}")
        is_small = verification.evidence(compared.first).is_small
        try:
            verification, compared = _repeat_in_float64(verification)
        except PhaseError as error:
            print(f"float64 is not possible: {error.reason}")
            rounding = [_NO_FLOAT64] if is_small else []
    faults = _check_batches(verification.samples())
    faults += verification.faults_of_ranks(are_steps_equal=not compared.first)
    if compared.first:
        evidence = verification.evidence(compared.first)
        # Beside a reason that is certain, others would only repeat the symptom.
        number = 1 if causes.is_explained(evidence) else 2
        reasons = causes.find(evidence)[:number] or [_NO_REASON]
        return [*faults, _describe(compared.first), *rounding, *reasons]
    faults += alone.check_rates()
    if verification.divisor == 1:
        faults += alone.check_factor()
    if not faults:
        rest = _CUT_SHORT if compared.is_cut_short else ""
        print(f"equal to {compared.largest:.0e} over {compared.steps[-1]} steps{rest}")
        print(f"not compared   {', '.join(verification.left_out())}")
    return faults


def _may_be_scaled(verification: Verification, difference: Difference) -> bool:
    evidence = verification.evidence(difference)
    return not causes.is_explained(evidence, by_size=False)


def _may_be_rounding(verification: Verification, difference: Difference) -> bool:
    is_explained = causes.is_explained(verification.evidence(difference))
    return not verification.dtype and not is_explained


def _repeat_in_float64(verification: Verification) -> tuple[Verification, Comparison]:
    directory = verification.directory / "float64"
    directory.mkdir()
    repeated = dataclasses.replace(verification, dtype="float64", directory=directory)
    return repeated, _run_and_compare(repeated)


def _run_and_compare(verification: Verification) -> Comparison:
    types = f" in {verification.dtype}" if verification.dtype else ""
    verification.run("ranks", f"{verification.size} ranks{types}")
    return _compare_with_reference(verification)


def _compare_with_reference(verification: Verification) -> Comparison:
    size, divisor = verification.size, verification.divisor
    types = f" in {verification.dtype}" if verification.dtype else ""
    # The script sees N ranks in the reference, too.
    scale = "" if divisor == 1 else f", gradients divided by {divisor:g}"
    batches = f"the batches of {size} ranks"
    verification.run("reference", f"one process, {batches}{types}{scale}")
    return verification.compare()


def _describe(difference: Difference) -> str:
    return (
        f"step {difference.step}: {difference.name} differs by {difference.size:.1e}, "
        f"its largest value is {difference.scale:.1e}"
    )


def _check_batches(samples: Samples) -> list[str]:
    """Print what the ranks have read; return what is wrong with it."""
    sizes = " and ".join(map(str, samples.sizes))
    shared = f"; {samples.number} read, {samples.shared:.1%} of them on several ranks"
    print(f"batches        {sizes} samples{shared if samples.number else ''}")
    if samples.has_equal_batches:
        return [
            "Two ranks have read the same batch: shard the data, such as "
            "x[hvd.rank() :: hvd.size()] or dataset.shard(hvd.size(), hvd.rank())."
        ]
    if samples.has_unequal_orders:
        return [
            "The data are sharded after a shuffle whose order is another one on each "
            "rank, so that ranks read samples of each other: shard before the shuffle, "
            "or pass the same seed on all ranks, such as dataset.shuffle(n, seed=1) or "
            "list_files(pattern, shuffle=False)."
        ]
    if samples.shared and samples.is_distinct:
        print(
            "               An epoch leaves out other samples: if ranks shuffle arrays "
            "before they take their shards, give them the same seed."
        )
    return []


class Alone:
    """The phase "alone", which runs when it is needed first."""

    def __init__(self, verification: Verification) -> None:
        self._verification = verification
        self._error: PhaseError | None = None

    @functools.cached_property
    def _has_run(self) -> bool:
        try:
            self._verification.run("alone", "one rank, for its learning rate")
        except PhaseError as error:
            self._error = error
        return not self._error

    def factor_of_size(self) -> float:
        """Return by what the script multiplies gradients because of `hvd.size()`."""
        return self._verification.factor_of_size() if self._has_run else 1.0

    def check_factor(self) -> list[str]:
        """Return what is wrong with the size of the gradients."""
        factor = self.factor_of_size()
        if factor == 1:
            return []
        return [
            f"The gradients are {factor:g} times those of one process with the same "
            "batch: the script multiplies or divides the loss, or the gradients, by "
            "hvd.size(). Leave it out: the ranks' gradients are averaged."
        ]

    def check_rates(self) -> list[str]:
        """Print how the learning rate is scaled; return what is wrong with it."""
        size = self._verification.size
        if not self._has_run and self._error:
            print(f"learning rate  unknown on one rank: {self._error.reason}")
            return []
        faults = []
        for name, factor in self._verification.scaling().items():
            print(f"learning rate  {name}: {factor:.3g} times that of one rank")
            if factor > size * _SCALING_TOLERANCE:
                faults.append(
                    f"The learning rate of {name} is {factor:.3g} times that of one "
                    f"rank; expected {size} times at most: it is scaled twice."
                )
        return faults


def _set_operands_apart(arguments: list[str]) -> list[str]:
    """Put `--` before `-m`, which is not a flag of this program."""
    if "-m" not in arguments:
        return arguments
    place = arguments.index("-m")
    try:
        # After a script it is an argument of the script.
        is_first = not flags.FLAGS(arguments[:place])[1:]
    except flags.Error:
        # `program.run` reports it.
        return arguments
    return [*arguments[:place], "--", *arguments[place:]] if is_first else arguments


if __name__ == "__main__":
    # Flags after the script are the script's.
    flags.FLAGS.set_gnu_getopt(False)
    sys.argv = _set_operands_apart(sys.argv)
    program.run(main, page=__doc__, operands="script")
