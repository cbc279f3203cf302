"""One rank of a phase: python -m hvdtrain.verify.worker OPTIONS SCRIPT ..."""

import contextlib
import gc
import json
import os
import pathlib
import random
import runpy
import sys
import time
from collections.abc import Iterator

import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.job import launchers
from hvdtrain.verify import capture
from hvdtrain.verify.batches_by_rank import BatchRecorder, BatchReplacer
from hvdtrain.verify.decisions import Decisions, note_decisions
from hvdtrain.verify.first_gradients import note_first_gradients
from hvdtrain.verify.left_out import leave_out_augmentation, leave_out_dropout
from hvdtrain.verify.noise import Noise, exchange_noise
from hvdtrain.verify.step_recorder import FinishedError, StepRecorder
from hvdtrain.verify.traced_reductions import note_reductions
from hvdtrain.verify.trajectory import Directory, PhaseOptions, ScriptEnd
from hvdtrain.verify.written_files import noted_files

# What the script does not seed has a seed of its own on each rank, as in a job, where
# it differs by process: a missing broadcast is seen, and unequal orders of samples.
_SEED = 20170815


@contextlib.contextmanager
def record_phase(options: PhaseOptions) -> Iterator[None]:
    """Record what the script in the block does; end it after its last step."""
    path = pathlib.Path(options.directory)
    recorded, files = Directory(path, "ranks"), Directory(path, options.phase)
    rank = launchers.launch().rank
    batches = BatchRecorder(recorded, rank=rank)
    is_reference = options.phase == "reference"
    is_recorded = options.phase != "ranks"
    recorder = StepRecorder(
        files,
        rank=rank,
        steps=options.steps,
        on_steps=(lambda steps: None) if is_recorded else batches.note_steps,
        has_variables=options.phase != "alone",
        recorded=recorded if is_recorded else None,
        compared_ranks=options.size if is_reference else 0,
        divisor=options.divisor if is_reference else 1.0,
    )
    _seed(_SEED + rank)
    if options.dtype:
        capture.compute_in(options.dtype)
    capture.refuse_horovod()
    leave_out_dropout()
    leave_out_augmentation()
    note_first_gradients(recorder.gradients)
    capture.record_steps(recorder, on_end=batches.note_end)
    size = options.size if is_recorded else 0
    noise = Noise(recorded, recorder.names, recorder.draws, rank=rank, size=size)
    exchange_noise(noise)
    if options.phase == "ranks":
        note_reductions(recorder)
        capture.note_losses(recorder)
        capture.note_class_weights(recorder)
        note_decisions(Decisions(files, rank=rank))
        capture.exchange_batches(batches)
        capture.note_other_loops(batches)
    if options.phase != "ranks":
        replacer = BatchReplacer(
            recorded, rank=rank, size=options.size, is_whole=is_reference
        )
        capture.exchange_batches(replacer)
    if is_reference:
        capture.compute_as_one_process()
    with contextlib.suppress(FinishedError), noted_files() as written:
        with _noted_end(files, rank, batches):
            yield
        # The step of a loop that took its last batch.
        recorder.record()
    # A thread of the script may still add to the set itself.
    files.write("written", rank, value=set(written))
    # A rank that leaves would end the collectives in which the others still are.
    if hvd.is_initialized():
        hvd.allgather_object(None, name="VerificationEnd")


@contextlib.contextmanager
def _noted_end(files: Directory, rank: int, batches: BatchRecorder) -> Iterator[None]:
    """Write when the script in the block ends by itself, or by an error."""
    try:
        yield
    except FinishedError:
        raise
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            # The text is in the output of the rank: Python prints it, or has.
            end = ScriptEnd(
                time=time.time(),
                has_failed=True,
                is_exit=isinstance(error, SystemExit),
                is_in_step=batches.is_in_step,
            )
            files.write("end", rank, value=end)
            raise
    files.write("end", rank, value=ScriptEnd(time=time.time()))


def _seed(seed: int) -> None:
    # Keras draws its own seeds from Python's generator.
    random.seed(seed)
    np.random.seed(seed)
    capture.seed_operations(seed)


def main(options: PhaseOptions, command: list[str]) -> None:
    """Run the script until its last step.

    Args:
        command: a script, or `-m` and a module, and the arguments.
    """
    is_module = command[0] == "-m"
    script = command[1] if is_module else command[0]
    sys.argv = [script, *command[2 if is_module else 1 :]]
    # As Python itself does: the directory of a script, or the working directory.
    sys.path[0] = "" if is_module else os.path.dirname(os.path.abspath(script))
    # The recorder searches all objects at each step. This leaves out the objects of the
    # imports, which are hundreds of thousands.
    gc.freeze()
    with record_phase(options):
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(PhaseOptions(**json.loads(sys.argv[1])), sys.argv[2:])
