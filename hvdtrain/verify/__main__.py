"""Checks that N ranks compute what one process computes, for a script of your own.

python -m hvdtrain.verify -np 2 train.py --epochs=3
python -m hvdtrain.verify -np 2 -m hvdtrain.mnist --dataset=digits

The script is not changed. It runs for some steps on N ranks, then again with the
batches of all ranks on each and without any reduction, which is what one process with
the N-times batch computes. Weights, optimizer and metrics are compared after each step.
If they differ, the first difference and its likely reason are printed, and the exit
code is 1. Dropout is left out. Takes as long as three starts of the script, or five if
a difference is compared again in float64.
"""

import dataclasses
import pathlib
import shutil
import signal
import sys
import tempfile

from absl import flags

from hvdtrain import program
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
    'No reason was found. The documents list the conditions: "When N ranks equal one '
    'process".'
)
_CUT_SHORT = ": this model multiplies rounding, which is too large in later steps"
_MAY_BE_ROUNDING = "It may be rounding: the comparison in float64 was not possible."


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

    signals.subscribe((signal.SIGINT, signal.SIGTERM), abort)
    verification = Verification(
        command=command,
        directory=directory,
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
            shutil.rmtree(directory)
    if is_kept:
        print(f"files          {directory}")
    if faults:
        raise JobError("\n".join(faults))


def _verify(verification: Verification) -> list[str]:
    """Run the phases and print what they show; return what is wrong."""
    compared = _run_and_compare(verification)
    rounding = []
    if compared.first and _may_be_rounding(verification, compared.first):
        print(f"may be rounding, repeated in float64: {_describe(compared.first)}")
        try:
            verification, compared = _repeat_in_float64(verification)
        except PhaseError as error:
            print(f"float64 is not possible: {error.reason}")
            rounding = [_MAY_BE_ROUNDING]
    faults = _check_batches(verification.samples())
    if compared.first:
        evidence = verification.evidence(compared.first)
        # Beside a reason that is certain, others would only repeat the symptom.
        number = 1 if causes.is_explained(evidence) else 2
        reasons = [*rounding, *causes.find(evidence)[:number]] or [_NO_REASON]
        return [*faults, _describe(compared.first), *reasons]
    faults += _check_scaling(verification)
    if not faults:
        rest = _CUT_SHORT if compared.is_cut_short else ""
        print(f"equal to {compared.largest:.0e} over {compared.steps[-1]} steps{rest}")
    return faults


def _may_be_rounding(verification: Verification, difference: Difference) -> bool:
    is_explained = causes.is_explained(verification.evidence(difference))
    return not verification.dtype and not is_explained


def _repeat_in_float64(verification: Verification) -> tuple[Verification, Comparison]:
    directory = verification.directory / "float64"
    directory.mkdir()
    repeated = dataclasses.replace(verification, dtype="float64", directory=directory)
    return repeated, _run_and_compare(repeated)


def _run_and_compare(verification: Verification) -> Comparison:
    size = verification.size
    types = f" in {verification.dtype}" if verification.dtype else ""
    verification.run("ranks", f"{size} ranks{types}")
    verification.run("reference", f"one process, the batches of {size} ranks{types}")
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
    return []


def _check_scaling(verification: Verification) -> list[str]:
    """Print how the learning rate is scaled; return what is wrong with it."""
    try:
        verification.run("alone", "one rank, for its learning rate")
    except PhaseError as error:
        print(f"learning rate  unknown on one rank: {error.reason}")
        return []
    faults = []
    for name, factor in verification.scaling().items():
        print(f"learning rate  {name}: {factor:.3g} times that of one rank")
        if factor > verification.size * _SCALING_TOLERANCE:
            faults.append(
                f"The learning rate of {name} is {factor:.3g} times that of one rank; "
                f"expected {verification.size} times at most: it is scaled twice."
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
