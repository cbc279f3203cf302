"""The report of runs: costs computed by hand, curves, and its program."""

import json
import pathlib
import subprocess
import sys

import pytest

from hvdtrain.job import JobError
from hvdtrain.report import goodput, runs
from hvdtrain.report.table import table

ROOT = pathlib.Path(__file__).parents[2]


def start(seconds, step, *, ranks=2):
    facts = {"max_steps": 1000, "ranks": ranks, "global_batch_size": 8}
    return {"event": "start", "seconds": seconds, "step": step, **facts}


def progress(seconds, step, *, loss=1.0):
    return {
        "event": "progress",
        "seconds": seconds,
        "step": step,
        "metrics": {"loss": loss},
        "learning_rate": 0.5,
        "communication": None,
        "samples_per_second": 80.0,
    }


def evaluation(seconds, step, **metrics):
    event = {"event": "evaluation", "seconds": seconds, "step": step}
    return {**event, "metrics": metrics}


# Killed after step 300, with a checkpoint at step 200.
KILLED = [
    start(100, 0),
    progress(101, 100),
    evaluation(101.5, 200, loss=0.5, accuracy=0.75),
    {"event": "checkpoint", "seconds": 102, "step": 200, "text": "written in 0.1 s"},
    progress(102.5, 300, loss=2.0),
    # The best of all, of weights that are lost.
    evaluation(103, 300, loss=0.125, accuracy=0.5),
]
CONTINUED = [
    *KILLED,
    start(500, 200, ranks=4),
    progress(501, 250, loss=0.5),
    evaluation(502, 600, loss=0.25, accuracy=0.875),
    progress(503, 1000, loss=0.25),
    evaluation(505, 1000, loss=0.375, accuracy=0.9375, f1=None),
]


def write(directory, lines, **summary):
    directory.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "log.jsonl").write_text(text)
    if summary:
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def test_costs_of_a_run_that_was_killed_and_continued():
    costs = runs.compute_costs(CONTINUED)
    assert costs.ranks == [2, 4]
    assert (costs.step, costs.max_steps) == (1000, 1000)
    assert costs.samples == 300 * 8 + 800 * 8
    assert costs.seconds == 3 + 5
    assert costs.samples_per_second == 1100
    # All reports have this speed.
    assert costs.speed_of_steps == 80
    assert costs.starts == 2
    assert costs.repeated_steps == 100
    assert [line["step"] for line in costs.evaluations] == [200, 600, 1000]
    assert costs.best_evaluation["step"] == 600


def test_costs_of_a_run_that_has_only_started():
    costs = runs.compute_costs([start(100, 0)])
    assert (costs.step, costs.samples, costs.seconds) == (0, 0, 0)
    assert costs.samples_per_second == 0
    assert costs.best_evaluation is None


def test_a_start_before_the_first_report_repeats_no_more():
    costs = runs.compute_costs(
        [*KILLED, start(500, 200), start(600, 200), progress(601, 250)]
    )
    assert costs.starts == 3
    assert costs.repeated_steps == 100
    assert costs.samples == 300 * 8 + 50 * 8


def straggler(rank, waiting, *, late=(0.0, 0.0), **delay_by_cause):
    values = {"rank": rank, "waiting": waiting, "late_seconds_by_rank": list(late)}
    return {"straggler": values | {"delay_by_cause": delay_by_cause}}


# 80 samples/s are 10 steps/s. The first process starts at 90 s and is killed after
# 126 s, the second one starts at 150 s, and continues from step 150.
MEASURED = [
    start(100, 0) | {"process_seconds": 10.0},
    progress(112, 100) | {"input_wait": 0.25, "evaluation_seconds": 0.0},
    progress(124, 200) | {"evaluation_seconds": 1.0, "saving_seconds": 1.0},
    {"event": "checkpoint", "seconds": 126, "step": 200, "text": "written in 0.1 s"},
    start(160, 150) | {"process_seconds": 10.0},
    progress(175, 250) | straggler(1, 0.125, late=(0, 0.004), input=0.5, other=0.25),
    progress(185, 350) | straggler(0, 0.25, late=(0.001, 0), compute=0.25),
    progress(205, 550) | straggler(1, 0.25, late=(0, 0.004), input=0.25),
    evaluation(208, 550, loss=1.0),
    {"event": "end", "seconds": 210, "step": 550, "evaluation_seconds": 4.0},
    {"event": "checkpoint", "seconds": 211, "step": 550, "text": "written in 0.1 s"},
]


def test_goodput_adds_up_to_the_wall_time():
    seconds = goodput.compute_goodput(MEASURED)
    assert sum(seconds.values()) == pytest.approx(211 - 90)
    repeated = 10 / 2
    # Of all seconds: the first are 15 with tracing.
    slowest = 0.125 * 15 + 0.25 * 10 + 0.25 * 20
    assert seconds == pytest.approx(
        {
            # 12 s and 15 s for 100 steps, which take 10 s without tracing.
            "start-up and tracing": 10 + 2 + 10 + 5,
            # The half of 100 steps.
            "repeated steps": repeated,
            "between kill and start": 150 - 126,
            "saving": 1 + 1,
            "evaluation": 1 + 4,
            "input wait": 0.25 * 10,
            "waiting for the slowest rank": slowest,
            # After the last reports.
            "other": 2 + 1,
            "productive": 10 + 10 + 40 - 0.25 * 10 - repeated - slowest,
        }
    )
    assert goodput.goodput_text(seconds) == (
        "productive 35.6 % of 0:02:01.0 wall time, start-up and tracing 22.3 %, "
        "repeated steps 4.1 %, between kill and start 19.8 %, saving 1.7 %, "
        "evaluation 4.1 %, input wait 2.1 %, waiting for the slowest rank 7.8 %, "
        "other 2.5 %"
    )


def test_goodput_of_an_old_log():
    # 100 steps would take longer than the log has: nothing is left for tracing.
    seconds = {c: s for c, s in goodput.compute_goodput(CONTINUED).items() if s}
    assert seconds == pytest.approx(
        {
            "productive": 1 + 0.75 + 3,
            "repeated steps": 0.75,
            "between kill and start": 397,
            "other": 0.5 + 2,
        }
    )


def test_goodput_of_a_run_that_has_only_started():
    seconds = goodput.compute_goodput([start(100, 0)])
    assert goodput.goodput_text(seconds) == "productive: no time is recorded yet"


def test_an_elastic_start_has_no_new_process():
    seconds = goodput.compute_goodput(
        [*MEASURED, start(215, 550) | {"process_seconds": 65.0}]
    )
    assert seconds["start-up and tracing"] == pytest.approx(27 + 4)
    assert sum(seconds.values()) == pytest.approx(215 - 90)


def test_rounded_shares_add_up():
    assert goodput.round_shares([1 / 3, 1 / 3, 1 / 3], 1000) == [334, 333, 333]
    assert goodput.round_shares([0.9996, 0.0004, 0.0], 1000) == [1000, 0, 0]


def test_delays_by_rank_and_cause(tmp_path):
    # Of 40 s, rank 1 costs half of 10 s and a quarter of 20 s by its input.
    delays = runs.compute_delays(MEASURED)
    assert delays[0] == pytest.approx({"compute": 2.5 / 40})
    assert delays[1] == pytest.approx({"input": 10 / 40, "other": 2.5 / 40})
    text = table(runs.read([write(tmp_path / "a", MEASURED)]))
    assert "1: input 25.0 %, other 6.2 %" in text


def test_curves_have_no_superseded_points(tmp_path):
    (run,) = runs.read([write(tmp_path / "a", CONTINUED)])
    loss = run.series("progress", lambda line: line["metrics"]["loss"])
    assert loss == ([100, 250, 1000], [1.0, 0.5, 0.25])
    assert run.metrics == ["loss", "accuracy", "f1"]
    assert run.restarts == [200]


def test_table(tmp_path):
    summary = {"model": "mlp", "dataset": "digits", "optimizer": "sgd"}
    first = write(tmp_path / "a", CONTINUED, **summary)
    text = table(runs.read([first, write(tmp_path / "b", KILLED)]))
    assert [line.split("  ") for line in squeezed(text)] == [
        ["run", "a", "b"],
        ["model, data, optimizer", "mlp, digits, sgd", "-"],
        ["ranks", "2, 4", "2"],
        ["global batch", "8", "8"],
        ["steps", "1,000 of 1,000", "300 of 1,000"],
        ["samples", "8,800", "2,400"],
        ["running time", "0:00:08.0", "0:00:03.0"],
        ["samples/s of running time", "1,100", "800"],
        ["samples/s of steps alone", "80", "80"],
        ["starts", "2", "1"],
        ["steps repeated", "100", "0"],
        ["late rank", "-", "-"],
        ["last evaluation, step", "1,000", "300"],
        ["last loss", "0.3750", "0.1250"],
        ["last accuracy", "0.9375", "0.5000"],
        ["last f1", "-", "-"],
        ["best evaluation, step", "600", "300"],
        ["best loss", "0.2500", "0.1250"],
        ["best accuracy", "0.8750", "0.5000"],
    ]


def squeezed(text):
    for line in text.splitlines():
        yield "  ".join(part.strip() for part in line.split("  ") if part.strip())


def test_a_wide_table_has_parts(tmp_path):
    directories = [write(tmp_path / f"{n}{'x' * 40}", KILLED) for n in range(3)]
    text = table(runs.read(directories))
    assert text.count("\nrunning time ") == 3
    assert max(map(len, text.splitlines())) <= 100


def test_names_are_as_short_as_is_unique(tmp_path):
    directories = [write(tmp_path / name / "run", KILLED) for name in "ab"]
    assert [run.name for run in runs.read(directories)] == ["a/run", "b/run"]
    assert [run.name for run in runs.read(directories[:1] * 2)] == ["run", "run"]


def test_summary_of_something_else(tmp_path):
    directory = write(tmp_path / "a", KILLED, model=7)
    assert "7" not in table(runs.read([directory])).split("ranks")[0]
    for text in ("[]", "[" * 200_000):
        (directory / "summary.json").write_text(text)
        assert runs.read([directory])[0].summary == {}


def test_a_directory_without_a_log(tmp_path):
    good = write(tmp_path / "a", KILLED)
    (tmp_path / "b").mkdir()
    with pytest.raises(JobError, match=r"/b/log\.jsonl: No such file"):
        runs.read([good, tmp_path / "b"])


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.long)])
def test_a_picture(tmp_path, count):
    plotting = pytest.importorskip("hvdtrain.report.plotting")
    directories = [write(tmp_path / str(n), CONTINUED) for n in range(count)]
    # No metric, and one that exists in no line of progress.
    directories.append(write(tmp_path / "new", [start(0, 0)]))
    directories.append(write(tmp_path / "late", MEASURED))
    plotting.draw(runs.read(directories), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_curves_of_a_run_look_like(tmp_path, monkeypatch):
    plotting = pytest.importorskip("hvdtrain.report.plotting")
    to_hex = plotting.matplotlib.colors.to_hex
    figures = []
    monkeypatch.setattr(
        plotting.Figure,
        "savefig",
        lambda figure, *args, **options: figures.append(figure),
    )
    twice = write(tmp_path / "twice", MEASURED)
    once = [line for line in MEASURED if line["event"] == "progress"]
    once = write(tmp_path / "once", [MEASURED[0], *once])
    plotting.draw(runs.read([twice, once]), "unused.png")
    [figure] = figures
    panels = {ax.get_title(): ax for ax in figure.axes}
    restarts = {
        title: [
            line.get_color() for line in ax.lines if [*line.get_xdata()] == [150, 150]
        ]
        for title, ax in panels.items()
    }
    arrival = "arrival, ms a step after the first rank: "
    assert restarts["loss"] == restarts[arrival + "twice"] == ["C0"]
    assert restarts[arrival + "once"] == []
    # A color means a run, a rank or a cause.
    of_runs = {to_hex(f"C{number}") for number in range(10)}
    of_ranks = {to_hex(line.get_color()) for line in panels[arrival + "once"].lines}
    bars = panels["wall time by cause"].patches
    of_causes = {to_hex(bar.get_facecolor()) for bar in bars}
    assert len(of_ranks) == 2
    assert len(of_causes) > 4
    assert not of_runs & of_ranks
    assert not of_runs & of_causes
    assert not of_ranks & of_causes


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, ["MODEL_DIR", "--help"]),
        (["--output="], 2, ["--output", "expected a path"]),
        (["/dev/null/none"], 1, ["Received /dev/null/none", "--model_dir"]),
        (["{directory}", "--output=/dev/null/a.png"], 1, ["another --output"]),
    ],
)
def test_mistakes_are_one_line(tmp_path, arguments, code, words):
    directory = write(tmp_path / "a", KILLED)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hvdtrain.report"),
            *(argument.format(directory=directory) for argument in arguments),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
