"""What guards find out about ranks that hang or have ended, and what they print."""

import dataclasses
import faulthandler
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from hvdtrain.flight import conclusion, deaths, ring, verdict
from hvdtrain.flight.answer import Answer, Member
from hvdtrain.flight.limits import Limits
from hvdtrain.flight.ring import Collective
from hvdtrain.flight.shared_directory import SharedDirectory
from hvdtrain.flight.stacks import Frame, Place, find_place

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = "/venv/lib/python3.11/site-packages"
NO_PROCESS = 1 << 30
LIMIT_SECONDS = 60


def until(condition):
    """Return what `condition` returns as soon as it is true."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, "the condition is still false"
        time.sleep(0.02)
    return result


def stack(*frames, thread="Current thread"):
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    return "\n".join([f"{thread} 0x00007f12 (most recent call first):", *lines, ""])


LOAD = ("/home/me/Train.py", 12, "load")
FIT = (f"{PACKAGES}/keras/src/backend/tensorflow/trainer.py", 320, "fit")
MAIN = ("/home/me/Train.py", 40, "<module>")
PDB = [
    ("/usr/lib/python3.11/pdb.py", 397, "_cmdloop"),
    ("/usr/lib/python3.11/bdb.py", 94, "trace_dispatch"),
]
BREAKPOINT = [*PDB, LOAD, FIT, MAIN]


def test_a_dump_of_two_threads_shows_where_the_main_thread_is():
    entered, end = threading.Event(), threading.Event()

    def block():
        entered.set()
        end.wait(LIMIT_SECONDS)

    def dump():
        line = sys._getframe().f_lineno + 1
        faulthandler.dump_traceback(file, all_threads=True)
        return line

    thread = threading.Thread(target=block)
    thread.start()
    try:
        assert entered.wait(LIMIT_SECONDS)
        with tempfile.TemporaryFile("w+") as file:
            line = dump()
            file.seek(0)
            text = file.read()
    finally:
        end.set()
        thread.join()
    assert "in block" in text
    assert find_place(text) == Place(Frame(__file__, line, "dump"))


def test_python_code_that_tensorflow_calls_is_preferred_to_the_main_thread():
    tensorflow = f"{PACKAGES}/tensorflow/python"
    called = stack(
        (f"{PACKAGES}/numpy/lib/npyio.py", 3, "read"),
        LOAD,
        (f"{tensorflow}/data/ops/from_generator_op.py", 200, "generator_py_func"),
        (f"{tensorflow}/ops/script_ops.py", 150, "__call__"),
        thread="Thread",
    )
    other = stack(("/home/me/logs.py", 1, "run"), thread="Thread")
    place = find_place(f"{called}\n{other}\n{stack(FIT, MAIN)}")
    assert place == Place(Frame(*LOAD), "input")
    assert str(place.frame) == "Train.py:12 in load"


def test_the_frame_of_the_user_is_the_innermost_one():
    callback_list = f"{PACKAGES}/keras/src/callbacks/callback_list.py"
    frames = [("<frozen runpy>", 1, "run"), LOAD, (callback_list, 9, "call"), FIT, MAIN]
    assert find_place(stack(*frames)) == Place(Frame(*LOAD), "callbacks")
    assert find_place(stack(FIT, MAIN)) == Place(Frame(*MAIN))


def test_a_frame_of_a_library_where_there_is_no_other():
    installed = (f"{PACKAGES}/pandas/io.py", 7, "read")
    assert find_place(stack(FIT, installed)) == Place(Frame(*installed))
    ours = (str(ROOT / "hvdtrain/mnist/__main__.py"), 5, "main")
    assert find_place(stack(FIT, ours)) == Place(Frame(*ours))


@pytest.mark.parametrize("text", ["", "Extension modules: numpy (total: 1)\n", stack()])
def test_no_place_without_frames(text):
    assert find_place(text) is None


def collective(number, name="gradients", operation="allreduce", size=8):
    return Collective(number, name, operation, size, step=3, entered=1.0, left=2.0)


def member(rank, size=3, **changes):
    made = Member(rank, size, f"node{rank}", NO_PROCESS + rank, "/no.ring")
    return dataclasses.replace(made, **changes)


def given(rank, state="running", **fields):
    return Answer(member(rank), state, **fields)


def waiting(rank, in_flight=None, **fields):
    in_flight = in_flight or collective(7)
    values = {"seconds": 40.0, "step": 3, "number": in_flight.number}
    return given(rank, in_flight=in_flight, **values | fields)


DEAD = given(
    1,
    "ended",
    cause="was killed",
    step=3,
    phase="callbacks",
    number=7,
    stacks=stack(LOAD),
)
LATE = "did not enter allreduce 7 (gradients, step 3) for 41 s."


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (
            [
                waiting(0),
                given(1, phase="input", stacks=stack(LOAD)),
                waiting(2, seconds=41.0),
            ],
            f"rank 1 on node1 {LATE} It is in its input, Train.py:12 in load; the other"
            " 2 ranks wait for it.",
        ),
        (
            [
                waiting(0, seconds=41.0, stacks=stack(MAIN)),
                given(1, "stopped", phase="compute"),
                given(2, phase="saving", stacks=stack(LOAD)),
            ],
            f"ranks 1 and 2 {LATE} Rank 1 is stopped, as by SIGSTOP; rank 2 is in "
            "saving, Train.py:12 in load; the other rank waits for them, "
            "Train.py:40 in <module>.",
        ),
        (
            [waiting(0, seconds=41.0), given(1, stacks=stack(*BREAKPOINT))],
            f"rank 1 on node1 {LATE} It is in a debugger, Train.py:12 in load; the "
            "other rank waits for it. With HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=0 the "
            "others wait for the debugger.",
        ),
        (
            # The script was started by `python -m pdb`, and runs.
            [
                waiting(0, seconds=41.0),
                given(1, phase="input", stacks=stack(LOAD, *PDB)),
            ],
            f"rank 1 on node1 {LATE} It is in its input, Train.py:12 in load; the "
            "other rank waits for it.",
        ),
        (
            [waiting(0, seconds=41.0), given(1, "silent", phase="input")],
            f"rank 1 on node1 {LATE} It does not respond: it is blocked in the kernel, "
            "handles SIGQUIT itself, or its guard has been killed; the other rank "
            "waits for it.",
        ),
        (
            [
                waiting(0, stacks=stack(LOAD)),
                waiting(1, collective(7, "weights", "broadcast"), stacks=stack(MAIN)),
            ],
            "For 40 s: rank 0 in allreduce 7 (gradients), Train.py:12 in load; rank 1 "
            "in broadcast 7 (weights), Train.py:40 in <module>. The other ranks are "
            "not visible here.",
        ),
        (
            [
                waiting(0, stacks=stack(LOAD)),
                waiting(1, collective(7, "weights", "broadcast")),
                waiting(2, collective(7, "weights", "broadcast")),
            ],
            "Deadlock: for 40 s the ranks wait in different collectives, which they "
            "call in different orders: rank 0 in allreduce 7 (gradients), Train.py:12 "
            "in load; ranks 1 and 2 in broadcast 7 (weights).",
        ),
        (
            # A collective of a process set, after 7 of all ranks.
            [
                waiting(0, collective(0, "g"), number=7, seconds=41.0),
                given(1, phase="input", number=7, stacks=stack(LOAD)),
            ],
            "rank 1 on node1 did not enter allreduce (g, step 3) for 41 s. It is in "
            "its input, Train.py:12 in load; the other rank waits for it.",
        ),
        (
            [waiting(0), waiting(1, seconds=39.0), waiting(2)],
            "All 3 ranks have been in allreduce 7 (gradients) for 39 s: none is late, "
            "and the communication does not complete.",
        ),
        (
            [waiting(0, stacks=stack(LOAD)), waiting(1)],
            "rank 2 is late, on another host, or not started: ranks 0 and 1 have been "
            "in allreduce 7 (gradients) for 40 s, Train.py:12 in load.",
        ),
        (
            [waiting(0)],
            "ranks 1 and 2 are late, on another host, or not started: rank 0 has been "
            "in allreduce 7 (gradients) for 40 s.",
        ),
        (
            [waiting(0), DEAD],
            "rank 1 on node1 was killed. It was in step 3, a callback, Train.py:12 in "
            "load. Its last collective was number 7.\n"
            "rank 0 waits for it in allreduce 7 (gradients).",
        ),
        (
            [waiting(0, collective(0, "end", "join")), waiting(1), waiting(2)],
            "All 2 ranks have been in allreduce 7 (gradients) for 40 s: none is late, "
            "and the communication does not complete.",
        ),
        (
            [given(0, phase="compute"), waiting(1, seconds=0.5), given(2)],
            "rank 0 is in its compute; rank 1 is in allreduce 7 (gradients); rank 2 "
            "is running; its stack has no Python frame.",
        ),
        (
            [given(0, phase="start"), DEAD, given(2, "left", cause="has ended")],
            "rank 1 on node1 was killed. It was in step 3, a callback, Train.py:12 in "
            "load. Its last collective was number 7.\nrank 2 on node2 has ended.\n"
            "rank 0 is in its start.",
        ),
        ([given(1, "ended", cause="was killed")], "rank 1 on node1 was killed."),
    ],
)
def test_conclusion(answers, text):
    assert conclusion.conclude(answers) == text


@pytest.mark.parametrize(
    ("late", "names"),
    [
        ([1, 2, 3, 4], "ranks 1, 2, 3 and 4 did"),
        ([1, 2, 3, 4, 5, 6], "ranks 1, 2, 3 and 3 more did"),
    ],
)
def test_many_ranks_are_listed_shortly(late, names):
    text = conclusion.conclude([waiting(0), *map(given, late)])
    assert text.startswith(f"{names} not enter allreduce 7 ")


JOIN = collective(0, "end", "join")
EVALUATES = collective(8, "MetricCounts", "allgather")
# What Python's exit does first.
JOINS_THREADS = "".join(
    [
        stack(("/usr/lib/python3.11/threading.py", 982, "run"), thread="Thread"),
        stack(("/usr/lib/python3.11/threading.py", 1590, "_shutdown"), thread="Thread"),
    ]
)


@pytest.mark.parametrize(
    ("answers", "is_found", "rank"),
    [
        # Rank 1 has ended the training in which the others wait for it.
        ([waiting(0), given(1, fits=1), waiting(2)], True, 1),
        # Rank 1 has ended its script, and its thread may run for ever.
        ([waiting(0), given(1, stacks=JOINS_THREADS), waiting(2)], True, 1),
        # Threads train.
        (
            [
                waiting(0, stacks=JOINS_THREADS),
                given(1, stacks=JOINS_THREADS),
                waiting(2, stacks=JOINS_THREADS),
            ],
            False,
            None,
        ),
        # It comes from a training that all have ended, and may start the next.
        ([waiting(0, fits=1), given(1, fits=1), waiting(2, fits=1)], False, None),
        # It is late by a training, in which it will call what the others wait for.
        ([waiting(0, fits=2), given(1, fits=1), waiting(2, fits=2)], False, None),
        ([waiting(0), waiting(1, EVALUATES), waiting(2)], True, None),
        ([waiting(0), waiting(1, EVALUATES), given(2)], False, None),
        ([waiting(0), waiting(1, EVALUATES, seconds=9.0), waiting(2)], False, None),
        ([waiting(0), waiting(1, EVALUATES, state="stopped")], False, None),
        # Ranks of another host are not seen.
        ([waiting(0), waiting(1, EVALUATES)], False, None),
        (
            [waiting(0, collective(0, "end", "join")), waiting(1), waiting(2)],
            False,
            None,
        ),
        ([waiting(0, JOIN), given(1, fits=1), waiting(2, JOIN)], False, None),
        ([waiting(0), waiting(1), waiting(2)], False, None),
        ([DEAD, waiting(0)], False, None),
        ([], False, None),
    ],
)
def test_a_wait_that_cannot_end(answers, is_found, rank):
    found = verdict.find(answers, seconds=30.0)
    assert bool(found) == is_found
    if found:
        assert (found.member and found.member.rank) == rank
        assert found.text.startswith(conclusion.conclude(answers))
        assert "StopTogetherCallback" in found.text
        assert found.text.endswith("HVDTRAIN_DEADLOCK_SECONDS=30")


@pytest.mark.parametrize(
    ("operation", "seconds"),
    # Horovod looks once in 3 s; then a script has 10 s to end by itself.
    [("init", 30), ("shutdown", 7), ("allreduce", 25), ("join", math.inf)],
)
def test_each_wait_has_its_limit(operation, seconds):
    limits = Limits(3, 12, init_seconds=20, deadlock_seconds=7)
    assert limits.end(operation)[0] == seconds
    assert Limits().end(operation)[0] == math.inf


@pytest.mark.parametrize(
    ("last", "seconds"), [(0, 7), (7, 10.5), (10.5, 14), (24, 25), (25, 28.5)]
)
def test_a_wait_is_examined_again_and_at_its_limit(last, seconds):
    limits = Limits(3, 12, init_seconds=20, deadlock_seconds=7)
    assert limits.examination("allreduce", last) == seconds
    assert Limits(3, 12).examination("allreduce", last) == (37.5 if last == 25 else 25)


IN_INIT = collective(0, "hvd.init", "init")


@pytest.mark.parametrize(
    ("answers", "is_found"),
    [
        # Data may be on the way through a slow network.
        ([waiting(0), waiting(1)], False),
        ([waiting(0)], False),
        # Rank 1 has sent what rank 0 still receives.
        ([waiting(0), given(1, number=8)], False),
        ([waiting(0), given(1, number=6)], True),
        ([waiting(0), waiting(1, state="stopped")], True),
        ([waiting(0), waiting(1, state="ended", cause="was killed")], True),
        ([waiting(0), given(1, "silent")], True),
        ([waiting(0, IN_INIT), waiting(1, IN_INIT)], True),
    ],
)
def test_a_collective_that_should_have_failed(answers, is_found):
    found = verdict.find_failed(answers, answers[0].in_flight, "LIMIT=6")
    assert bool(found) == is_found
    if found:
        assert found.text == f"{conclusion.conclude(answers)} LIMIT=6"


def test_suspects_are_the_ranks_that_others_wait_for():
    stopped = dataclasses.replace(waiting(2), state="stopped")
    late = [given(1), stopped]
    assert conclusion.suspects([waiting(0), *late]) == late
    for alike in ([waiting(0), waiting(1)], [given(0), given(1)]):
        assert conclusion.suspects(alike) == alike


def first_difference(*names_by_rank, first=(5, 5, 5), is_waiting=True):
    return conclusion.first_difference(
        [
            (waiting if is_waiting else given)(
                rank,
                collectives=tuple(
                    collective(first[rank] + i, name) for i, name in enumerate(names)
                ),
            )
            for rank, names in enumerate(names_by_rank)
        ]
    )


def test_the_first_collective_that_differs():
    differs = "The records differ first in collective"
    a, b, c = (f"allreduce {name} of 8 bytes" for name in "abc")
    assert first_difference("abc", "ac", "abc") == (
        f"{differs} 6. ranks 0 and 2: {b}; rank 1: {c}."
    )
    assert first_difference("ab", "ba") == f"{differs} 5. rank 0: {a}; rank 1: {b}."
    assert first_difference("ab", "a") == (
        "The records of all ranks agree up to collective 5. rank 1 did not enter "
        "allreduce 6 (b) yet, which rank 0 entered."
    )
    # A job that runs is read at different times.
    running = first_difference("ab", "a", is_waiting=False)
    assert running == "The records of all ranks agree up to collective 5."


def test_records_that_agree():
    agree = "The records of all ranks agree up to collective"
    assert first_difference("abc", "abc") == f"{agree} 7."
    # Rank 1 has overwritten the records of 1,000 and 1,001.
    assert first_difference("abcd", "cd", first=(1000, 1002)) == f"{agree} 1,003."
    nothing = "The records have no collectives of all ranks to compare."
    assert first_difference("ab") == first_difference("ab", "") == nothing


RECORDING = """
import signal, sys
from hvdtrain.native import recorder
recorder.open_ring(sys.argv[1])
recorder.set_step(3)
for _ in range(1101):
    with recorder.collective("g", "allreduce", size_bytes=8, is_of_all_ranks=True):
        pass
with recorder.collective("part", "allreduce", size_bytes=0, is_of_all_ranks=False):
    pass
with recorder.phase("evaluation"):
    with recorder.collective("m", "allgather", size_bytes=16, is_of_all_ranks=True):
        print("entered", flush=True)
        signal.pause()
"""


@pytest.mark.long
def test_the_ring_of_a_process_that_was_killed_in_a_collective(tmp_path):
    path = tmp_path / "ring"
    command = [sys.executable, "-c", RECORDING, path]
    before = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        timer = threading.Timer(2 * LIMIT_SECONDS, process.kill)
        timer.start()
        assert process.stdout.readline() == b"entered\n"
        process.kill()
        timer.cancel()
    found = ring.read(path)
    assert (found.phase, found.step, found.number) == ("evaluation", 3, 1102)
    last = found.in_flight
    assert (last.number, last.name, last.operation) == (1102, "m", "allgather")
    assert (last.bytes, last.step, last.left) == (16, 3, 0.0)
    assert before < found.phase_entered <= last.entered < time.monotonic()
    # The last 1,024 of 1,104 records, of which one is a phase.
    numbers = [each.number for each in found.collectives]
    assert numbers == [*range(81, 1102), 0, 1102]
    assert all(each.entered <= each.left for each in found.collectives[:-1])
    moment = ring.read_moment(path)
    assert (moment.phase, moment.step, moment.entered) == (
        "evaluation",
        3,
        last.entered,
    )


@pytest.mark.parametrize("content", [None, b"", b"text" * 2000])
def test_a_file_that_is_no_ring(tmp_path, content):
    path = tmp_path / "ring"
    if content is not None:
        path.write_bytes(content)
    assert ring.read(path) is ring.read_moment(path) is None


@pytest.fixture
def shared(tmp_path):
    """A shared of ranks 0 and 1."""
    made = SharedDirectory(tmp_path / "job")
    for rank in (1, 0):
        made.add(member(rank))
    return made


def test_the_last_member_removes_the_directory(shared):
    assert shared.members() == [member(0), member(1)]
    shared.add(member(1, size=5))
    assert [each.size for each in shared.members()] == [3, 5]
    shared.write_answer("", DEAD)
    shared.write_conclusion("text")
    shared.remove_conclusion()
    assert not shared.conclusion(within_seconds=LIMIT_SECONDS)
    shared.remove(member(1))
    assert (shared.members(), shared.answers()) == ([member(0)], [])
    shared.remove(member(0))
    assert not shared.directory.exists()


def test_one_call_at_a_time(shared):
    call = shared.start_roll_call()
    assert shared.current_roll_call() == call
    assert shared.start_roll_call() is None
    shared.end_roll_call()
    assert shared.current_roll_call() is None
    assert shared.start_roll_call() not in (None, call)


def test_a_call_of_a_process_that_was_killed_is_replaced(shared):
    stale = shared.start_roll_call()
    past = time.time() - 31
    os.utime(shared.directory / "call.json", (past, past))
    assert shared.start_roll_call() not in (None, stale)


def test_ranks_that_have_ended_answer_every_call(shared):
    shared.write_answer("first", waiting(0))
    shared.write_answer("", DEAD)
    assert shared.answers("first") == [waiting(0), DEAD]
    assert shared.answers("second") == [DEAD]
    assert shared.wait_for_answers("first") == [waiting(0), DEAD]


def test_a_job_that_continues_forgets_the_ranks_that_it_has_lost(shared):
    shared.write_answer("first", waiting(0))
    shared.write_answer("", DEAD)
    shared.remove_lost()
    assert shared.members() == [member(0)]
    assert shared.answers() == [waiting(0)]


def test_a_directory_without_room_for_a_call_is_an_error(shared):
    with pytest.raises(OSError, match="No such file"):
        SharedDirectory(shared.directory / "gone").start_roll_call()


def test_a_truncated_file_is_skipped(shared):
    for name in ("member-x.json", "answer-x.json", "conclusion.json", "call.json"):
        (shared.directory / name).write_text('{"rank": 1, "si')
    assert shared.members() == [member(0), member(1)]
    assert shared.answers() == []
    assert not shared.conclusion(within_seconds=60)
    assert shared.current_roll_call() is None


def test_a_conclusion_counts_for_some_seconds(shared):
    shared.write_conclusion("rank 1 is late")
    assert shared.conclusion(within_seconds=LIMIT_SECONDS) == "rank 1 is late"
    assert shared.conclusion(within_seconds=-1) == ""


def cause(kills, fatal_error=""):
    return deaths.cause(NO_PROCESS, fatal_error=fatal_error, kills=kills)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("0::/job/rank", "job/memory.events"),
        ("4:memory:/job", "memory/job/memory.oom_control"),
    ],
)
def test_causes_of_death(monkeypatch, tmp_path, line, name):
    monkeypatch.setattr(deaths, "_CGROUPS", tmp_path)
    monkeypatch.setattr(deaths, "_SECONDS_FOR_EVIDENCE", 0.0)
    (tmp_path / "cgroup").write_text(f"{line}\n3:cpu:/job\n")
    counter = tmp_path / name
    counter.parent.mkdir(parents=True)
    counter.write_text("low 0\noom_kill 2\n")
    kills = deaths.OutOfMemoryKills(tmp_path / "cgroup")
    killed = "was killed by a signal such as SIGKILL, or has called os._exit"
    assert cause(kills) == killed
    counter.write_text("low 0\noom_kill 3\n")
    assert cause(kills) == (
        f"was killed by the out-of-memory killer (oom_kill of {counter} rose from 2 to "
        "3)"
    )
    # The kill of another process, before.
    kills.renew()
    assert "oom_kill" in cause(kills)
    kills.renew()
    assert cause(kills) == killed
    fatal = f"Fatal Python error: Aborted\n\n{stack(LOAD)}"
    assert cause(kills, fatal) == "died in native code: Aborted"
    assert deaths.is_fatal(fatal)
    assert not deaths.is_fatal(stack(LOAD))
