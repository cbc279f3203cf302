"""The output of the observers: console, bar and TensorBoard's logs."""

import contextlib
import dataclasses
import io
import json
import math
import os
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy import start

from hvdtrain.events import OTHER, Progress, Straggler
from hvdtrain.job import JobError
from hvdtrain.training.observers import Console, EventLog, make_observers, scalars
from hvdtrain.training.stragglers import CAUSES


def progress(step, **changes):
    values = {
        "step": step,
        "max_steps": 1000,
        "epoch": 1,
        "epochs": 10,
        "metrics": {"accuracy": 0.5, "loss": 1.25},
        "learning_rate": 0.125,
        "communication": math.nan,
        "input_wait": math.nan,
        "samples_per_second": 12345.6,
        "seconds_left": 61.2,
    }
    return Progress(**(values | changes))


def test_a_line_of_progress():
    file = io.StringIO()
    Console(file, has_bar=False).on_progress(progress(100))
    assert file.getvalue() == (
        "step 100/1000, epoch 1/10  loss 1.2500  accuracy 0.5000  12,346 samples/s  "
        "1:02 left\n"
    )


def test_a_line_of_a_job_that_had_finished():
    file = io.StringIO()
    finished = dataclasses.replace(start(100), checkpoint="run/checkpoints/step.json")
    Console(file, has_bar=False).on_finished(finished, {"loss": 0.5})
    assert file.getvalue() == (
        "had finished before: step 100 of 100 in run/checkpoints/step.json  "
        "loss 0.5000\n"
    )


STRAGGLER = Straggler(
    rank=5,
    host="node3",
    last_share=0.75,
    late_seconds=0.032,
    delay=0.18,
    delay_by_cause={"input": 0.16, "other": 0.02},
    cause="input",
    cause_seconds=0.041,
    others_seconds=0.009,
    waiting=0.15,
    late_seconds_by_rank=[0.0] * 5 + [0.032],
)


def test_a_line_when_a_rank_is_late_for_a_minute():
    file, seconds = io.StringIO(), iter(range(0, 1000, 15))
    console = Console(file, has_bar=False, every_seconds=900, clock=seconds.__next__)
    for step in range(8):
        console.on_progress(progress(step, straggler=STRAGGLER))
    assert file.getvalue().splitlines()[1:] == [
        "rank 5 on node3 delays the others by 18 %: its input takes 41 ms a step, "
        "theirs 9 ms"
    ]


def test_hours():
    file = io.StringIO()
    Console(file, has_bar=False).on_progress(progress(1, seconds_left=3 * 3600 + 5))
    assert file.getvalue().endswith("3:00:05 left\n")


def test_lines_are_seconds_apart_and_the_last_step_is_one():
    file, seconds = io.StringIO(), iter([0, 2, 4, 6, 8])
    console = Console(file, has_bar=False, every_seconds=5, clock=lambda: next(seconds))
    for step in (1, 2, 3, 4, 1000):
        console.on_progress(progress(step))
    steps = [line.split("/")[0] for line in file.getvalue().splitlines()]
    assert steps == ["step 1", "step 4", "step 1000"]


def test_a_line_of_evaluation():
    file = io.StringIO()
    Console(file, has_bar=False).on_evaluation(7, {"accuracy": 0.25, "loss": 2})
    assert file.getvalue() == "evaluation at step 7: loss 2.0000  accuracy 0.2500\n"


def test_logs_of_a_train_step_may_have_dictionaries():
    logs = {"loss": 1, "parts": {"a": np.float32(2), "b": np.zeros(2)}}
    assert scalars(logs) == {"loss": 1.0, "a": 2.0}


def test_lines_of_files():
    file = io.StringIO()
    console = Console(file, has_bar=False)
    console.on_checkpoint(7, "written in 0.1 s")
    console.on_export(7, "written to a in 0.1 s")
    assert file.getvalue() == (
        "checkpoint at step 7 written in 0.1 s\n"
        "export at step 7 written to a in 0.1 s\n"
    )


def test_bar_shows_the_same():
    file = io.StringIO()
    console = Console(file, has_bar=True)
    console.on_progress(progress(500))
    console.on_progress(progress(1000))
    console.on_evaluation(1000, {"loss": 1})
    shown = file.getvalue()
    assert "50%" in shown
    assert "1000/1000" in shown
    assert "epoch 1/10  loss 1.2500  accuracy 0.5000  12,346 samples/s" in shown
    assert shown.endswith("evaluation at step 1000: loss 1.0000\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("file", "size", "has_bar"),
    [(Terminal(), None, True), (Terminal(), "2", False), (io.StringIO(), None, False)],
)
def test_a_bar_only_on_terminals_without_a_launcher(monkeypatch, file, size, has_bar):
    for name, value in (("HOROVOD_SIZE", size), ("HOROVOD_RANK", size and "0")):
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    (console,) = make_observers(file)
    console.on_progress(progress(500))
    assert ("50%" in file.getvalue()) == has_bar


def test_logs_only_with_a_directory(tmp_path):
    _, *logs = make_observers(io.StringIO(), model_dir=tmp_path)
    for log in logs:
        log.on_evaluation(5, {"loss": 1})
    entries = sorted(path.name for path in tmp_path.iterdir())
    assert entries == ["log.jsonl", "test", "train"]


def test_tensorboard_reads_the_event_log(tmp_path):
    log = EventLog(tmp_path, warn=pytest.fail)
    log.on_progress(progress(100))
    metrics = {"loss": 0.5, "accuracy": 1.0}
    log.on_progress(
        progress(
            200,
            metrics=metrics,
            communication=0.25,
            input_wait=0.5,
            skipped_updates=3,
            straggler=STRAGGLER,
        )
    )
    log.on_evaluation(200, {"loss": 0.75})
    train = EventAccumulator(str(tmp_path / "train")).Reload()
    test = EventAccumulator(str(tmp_path / "test")).Reload()
    assert set(train.Tags()["tensors"]) == {
        *("loss", "accuracy"),
        *("learning_rate", "communication", "input_wait", "samples_per_second"),
        "skipped_updates",
        *(f"straggler/{name}" for name in ("rank", "delay", "last_share", "waiting")),
        "straggler/late_seconds",
        *(f"straggler/delay_by_cause/{cause}" for cause in (*CAUSES, OTHER)),
    }
    (event,) = train.Tensors("straggler/delay_by_cause/input")
    assert number(event) == pytest.approx(0.16)
    read = [(event.step, number(event)) for event in train.Tensors("loss")]
    assert read == [(100, 1.25), (200, 0.5)]
    assert number(test.Tensors("loss")[0]) == pytest.approx(0.75)
    assert number(train.Tensors("learning_rate")[0]) == pytest.approx(0.125)


def test_event_log_that_cannot_be_made(tmp_path):
    (tmp_path / "train").write_text("a file")
    with pytest.raises(JobError, match=rf"logs to {tmp_path}: Not a directory; "):
        EventLog(tmp_path, warn=pytest.fail)


def test_a_full_disk_is_reported_once_and_logs_go_on_when_it_has_space(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        file = io.StringIO()
        _, *logs = make_observers(file, model_dir=tmp_path)
        for step in range(1, 8):
            if step == 3:
                fill(tmp_path / "big")
            if step == 6:
                (tmp_path / "big").unlink()
            for log in logs:
                # Longer than the rest of a page.
                log.on_progress(progress(step, metrics={"loss" * 1500: 1.0, "loss": 2}))
        assert [line["step"] for line in written_lines(tmp_path)] == [1, 2, 6, 7]
        # Not by name, whose last number is that of all files of this process.
        written = (tmp_path / "train").iterdir()
        files = sorted(written, key=lambda path: path.stat().st_mtime_ns)
        logs = [EventAccumulator(str(path)).Reload() for path in files]
        steps = [event.step for log in logs for event in log.Tensors("loss")]
        assert steps == [1, 2, 6, 7]
    finally:
        # Lazily: the logs are still open.
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
    first, second = file.getvalue().splitlines()
    assert first == (
        f"WARNING: Cannot write {tmp_path / 'log.jsonl'}: No space left on device; "
        "training continues, without lines in it meanwhile."
    )
    assert "TensorBoard's logs" in second
    assert "No space left on device" in second


def fill(path):
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(512)):
            pass


def written_lines(directory):
    for text in (directory / "log.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(text)


def number(event):
    return float(tf.make_ndarray(event.tensor_proto))
