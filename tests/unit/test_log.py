"""log.jsonl: written by the observer, read again, also after a kill."""

import json
import math
import os

import pytest
from toy import start

from hvdtrain import log
from hvdtrain.events import Progress, RunEnd, Straggler
from hvdtrain.job import JobError

STRAGGLER = Straggler(
    rank=1,
    host="node1",
    last_share=0.75,
    late_seconds=0.02,
    delay=0.25,
    delay_by_cause={"other": 0.25},
    cause="other",
    cause_seconds=math.nan,
    others_seconds=math.nan,
    waiting=0.125,
    late_seconds_by_rank=[0.0, 0.02],
)


def progress(step, loss):
    return Progress(
        step=step,
        max_steps=100,
        epoch=1,
        epochs=2,
        metrics={"loss": loss},
        learning_rate=0.5,
        communication=math.nan,
        input_wait=0.125,
        samples_per_second=16.0,
        seconds_left=1.0,
        straggler=STRAGGLER,
        evaluation_seconds=0.5,
    )


@pytest.fixture
def make(tmp_path):
    """Return a function that opens the log, as each run of a job does."""
    seconds = iter(range(1000, 2000))
    return lambda: log.JsonLog(tmp_path, warn=pytest.fail, clock=lambda: next(seconds))


def test_lines_are_as_documented(make, tmp_path):
    writer = make()
    writer.on_start(start(0))
    writer.on_progress(progress(40, 0.25))
    writer.on_evaluation(100, {"loss": 0.125, "f1": math.nan})
    writer.on_checkpoint(100, "written in 0.1 s")
    writer.on_end(RunEnd(step=100, evaluation_seconds=0.5, saving_seconds=math.nan))
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert (
        [json.loads(line) for line in lines]
        == log.read(tmp_path)
        == [
            {
                "event": "start",
                "seconds": 1000,
                "step": 0,
                "max_steps": 100,
                "ranks": 2,
                "global_batch_size": 8,
                "local_batch_sizes": [4, 4],
                "accumulation_steps": 1,
                "learning_rate": 0.5,
                "model": "mlp",
                "optimizer": "sgd",
                "mesh": {"data": 2, "pipeline": 1, "model": 1},
                "reduction": "shared memory",
                "controller": "Gloo",
                "hosts": ["node1", "node1"],
                "threads": [1, 1],
                "cpu_quota": "",
                "versions": {"Keras": "3"},
                "compiles_gradients": False,
                "checkpoint": "",
                "replicas_before": None,
                "process_seconds": 4.5,
            },
            {
                "event": "progress",
                "seconds": 1001,
                "step": 40,
                "metrics": {"loss": 0.25},
                "learning_rate": 0.5,
                "communication": None,
                "input_wait": 0.125,
                "samples_per_second": 16.0,
                "skipped_updates": 0,
                "evaluation_seconds": 0.5,
                "saving_seconds": None,
                "straggler": {
                    "rank": 1,
                    "host": "node1",
                    "last_share": 0.75,
                    "late_seconds": 0.02,
                    "delay": 0.25,
                    "delay_by_cause": {"other": 0.25},
                    "cause": "other",
                    "cause_seconds": None,
                    "others_seconds": None,
                    "waiting": 0.125,
                    "late_seconds_by_rank": [0.0, 0.02],
                },
            },
            {
                "event": "evaluation",
                "seconds": 1002,
                "step": 100,
                "metrics": {"loss": 0.125, "f1": None},
            },
            {
                "event": "checkpoint",
                "seconds": 1003,
                "step": 100,
                "text": "written in 0.1 s",
            },
            {
                "event": "end",
                "seconds": 1004,
                "step": 100,
                "evaluation_seconds": 0.5,
                "saving_seconds": None,
            },
        ]
    )


def test_a_start_supersedes_later_steps(make, tmp_path):
    writer = make()
    writer.on_start(start(0))
    for step in (10, 20, 30):
        writer.on_progress(progress(step, 4.0))
    before = (tmp_path / "log.jsonl").read_bytes()
    writer = make()
    writer.on_start(start(20))
    for step in (25, 35):
        writer.on_progress(progress(step, 2.0))
    # Nothing is rewritten.
    assert (tmp_path / "log.jsonl").read_bytes().startswith(before)
    lines = log.drop_superseded(log.read(tmp_path))
    found = [
        (line["step"], line["metrics"]["loss"])
        for line in lines
        if line["event"] == "progress"
    ]
    assert found == [(10, 4.0), (20, 4.0), (25, 2.0), (35, 2.0)]
    assert [e["step"] for e in lines if e["event"] == "start"] == [0, 20]


def test_a_line_that_was_cut_off_harms_no_other(make, tmp_path):
    writer = make()
    writer.on_start(start(0))
    writer.on_progress(progress(10, 4.0))
    path = tmp_path / "log.jsonl"
    os.truncate(path, path.stat().st_size - 9)  # as of a process killed in a write
    assert [line["event"] for line in log.read(tmp_path)] == ["start"]
    make().on_progress(progress(20, 2.0))
    assert [line["step"] for line in log.read(tmp_path)] == [0, 20]


def test_lines_of_other_programs_are_skipped(make, tmp_path):
    make().on_start(start(0))
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'\0\0\xff\n7\n[]\n{"event": []}\n{"event": "progress"}\n\n')
        file.write(b"[" * 200_000 + b"\n")
        file.write(b'{"event": "evaluation", "seconds": 1, "step": 1, "metrics": 7}\n')
        file.write(b'{"event": "end", "seconds": 1, "step": 1, "saving_seconds": ""}\n')
        file.write(b'{"event": "x", "seconds": 1, "step": 1}\n')
    assert [line["event"] for line in log.read(tmp_path)] == ["start"]


def test_a_log_that_cannot_be_opened(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(JobError, match=r"log\.jsonl: Is a directory; .*--model_dir"):
        log.JsonLog(tmp_path, warn=pytest.fail)


def test_a_write_that_fails_is_reported_once(tmp_path):
    texts = []
    writer = log.JsonLog(tmp_path, warn=texts.append)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), writer._file.fileno())
    for step in (10, 20):
        writer.on_progress(progress(step, 4.0))
    assert texts == [
        f"Cannot write {tmp_path / 'log.jsonl'}: No space left on device; training "
        "continues, without lines in it meanwhile."
    ]


def test_what_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(JobError, match=r"Received .*none; expected .* existing dir"):
        log.read(tmp_path / "none")
    with pytest.raises(JobError, match=r"Cannot read .*log\.jsonl: No such file"):
        log.read(tmp_path)
    (tmp_path / "log.jsonl").write_text("other\n")
    with pytest.raises(JobError, match=r"log\.jsonl has no line of a start"):
        log.read(tmp_path)
