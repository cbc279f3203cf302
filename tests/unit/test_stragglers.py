"""Arrivals of ranks at collectives, computed by hand, and what made one late."""

import gc
import math
import os
import time

import numpy as np
import pytest

from hvdtrain import processes
from hvdtrain.training import stragglers
from hvdtrain.training.stragglers import (
    COLUMNS,
    GARBAGE,
    STOLEN,
    THROTTLING,
    WAITS,
    RankTimes,
    StragglerNotice,
    align_waits,
    find_last,
    find_straggler,
    split,
)


def row(waits, *, newest=None, seconds=1.0, collectives=None, **causes):
    count = len(waits)
    values = {"seconds": seconds, "newest": newest or count} | causes
    values["collectives"] = collectives or count
    columns = [values.get(name.replace(" ", "_"), 0.0) for name in COLUMNS]
    return np.array([*columns, *[math.nan] * (WAITS - count), *waits])


def find(*rows, steps=4):
    hosts = [f"node{rank}" for rank in range(len(rows))]
    return find_straggler(np.stack(rows), steps=steps, hosts=hosts)


def test_the_shortest_wait_arrived_last():
    waits = np.array([[0.021, 0.0, 0.5], [0.019, 0.03, 0.5], [0.0, 0.01, 0.4]])
    last, late = find_last(waits)
    assert last.tolist() == [2, 0, 2]
    assert late.tolist() == pytest.approx([0.020, 0.020, 0.1])


def test_who_how_often_by_how_much_and_why():
    # Of four steps in a second, rank 1 is last in three, by 80, 60 and 40 ms.
    waits = [[0.08, 0.06, 0.04, 0.0], [0.0, 0.0, 0.0, 0.01], [0.08, 0.06, 0.04, 0.03]]
    found = find(
        row(waits[0], input=0.02, compute=0.6),
        row(waits[1], input=0.16, compute=0.64),
        row(waits[2], input=0.04, compute=0.6),
    )
    assert (found.rank, found.host, found.cause) == (1, "node1", "input")
    assert found.last_share == 0.75
    assert found.late_seconds == pytest.approx(0.18 / 4)
    assert found.delay == pytest.approx(0.18)
    # Of 180 ms, input explains 160 - 30, compute 640 - 600, and nothing the rest.
    assert found.delay_by_cause == pytest.approx(
        {"input": 0.13, "compute": 0.04, "other": 0.01}
    )
    assert found.cause_seconds == pytest.approx(0.04)
    assert found.others_seconds == pytest.approx(0.0075)
    # After the first rank: 0, 180 and 0 ms, then 30, 20 and 0 ms.
    assert found.late_seconds_by_rank == pytest.approx([0.0075, 0.05, 0.0])
    # Means of 160, 120, 80 and 40 ms over three ranks.
    assert found.waiting == pytest.approx(0.4 / 3)
    assert str(found) == (
        "rank 1 on node1 delays the others by 18 %: its input takes 40 ms a step, "
        "theirs 7.5 ms"
    )


def test_the_last_collectives_stand_for_all():
    rows = [row([wait] * WAITS, collectives=2 * WAITS) for wait in (0.001, 0.0)]
    found = find(*rows, steps=2 * WAITS)
    assert found.delay == pytest.approx(0.128)
    assert found.late_seconds == pytest.approx(0.001)
    assert found.cause == "other"
    assert str(found) == "rank 1 on node1 delays the others by 13 %"


def test_no_arrivals_no_straggler():
    assert find(row([0.0])) is None
    assert find(row([]), row([])) is None
    assert find(row([0.0] * WAITS, newest=1000), row([0.1] * WAITS)) is None


def test_ranks_read_their_times_a_collective_apart():
    rows = [row([0.1, 0.2], newest=8), row([0.3, 0.4, 0.5], newest=9)]
    assert align_waits(np.stack(rows)).tolist() == [[0.1, 0.2], [0.3, 0.4]]


def test_a_cause_precedes_the_phase_in_which_it_happens():
    excess = dict.fromkeys(stragglers.CAUSES, 0.0)
    excess |= {"stolen CPU time": 0.75, "compute": 1.0, "input": -1.0}
    parts = {name: s for name, s in split(1.0, excess).items() if s}
    assert parts == {"stolen CPU time": 0.75, "compute": 0.25}


def report(rank, delay):
    waits = [[delay, 0.0], [0.0, delay]]
    return find(*(row([waits[rank == 0][r]], callbacks=0.5 * r) for r in (0, 1)))


def test_a_notice_after_a_minute_and_once():
    seconds = iter(range(0, 1000, 20))
    notice = StragglerNotice(clock=lambda: next(seconds))
    texts = [notice(report(1, delay)) for delay in (0.3, 0.08, 0.12, 0.2, 0.2, 0.2)]
    # At 60 s the mean is 17.5 %.
    assert [bool(text) for text in texts] == [False, False, False, True, False, False]
    assert texts[3] == (
        "rank 1 on node1 delays the others by 20 %: its callbacks take 125 ms a step, "
        "theirs 0 ms"
    )


@pytest.mark.parametrize("delays", [[0.09] * 9, [0.3, 0.3, 0.3], [0.35, 0, 0, 0, 0]])
def test_no_notice_of_less_or_shorter_delays(delays):
    seconds = iter(range(0, 1000, 20))
    notice = StragglerNotice(clock=lambda: next(seconds))
    assert not any(notice(report(1, delay)) for delay in delays)


def test_a_row_is_since_the_last_one():
    seconds = {"input": 1.0, "compute": 5.0}
    waits = [7, np.array([9.0] * 7)]
    clock = iter([100.0, 102.0, 103.0])
    times = RankTimes(
        lambda: seconds,
        lambda count: tuple(waits),
        system_seconds=lambda: dict.fromkeys((THROTTLING, STOLEN, GARBAGE), 4.0),
        clock=lambda: next(clock),
    )
    seconds |= {"input": 1.5, "compute": 5.75}
    waits[:] = 9, np.array([9.0] * 7 + [0.25, 0.5])
    unknown = dict.fromkeys(("callbacks", "evaluation", "saving"), math.nan)
    expected = row(
        [0.25, 0.5], newest=9, seconds=2.0, input=0.5, compute=0.75, **unknown
    )
    np.testing.assert_array_equal(times.read(), expected)
    expected = row([], newest=9, seconds=1.0, **unknown)
    np.testing.assert_array_equal(times.read(), expected)


def test_the_system_is_measured(tmp_path):
    before = stragglers.measure_system()["garbage collection"]
    gc.collect()
    found = stragglers.measure_system()
    assert before < found["garbage collection"] < before + 60
    assert all(seconds >= 0 for seconds in found.values())
    task = tmp_path / "1"
    task.mkdir()
    (task / "schedstat").write_text("5 2000000000 7\n")
    (tmp_path / "2").mkdir()
    cores = len(os.sched_getaffinity(0))
    assert stragglers._run_queue_seconds(tmp_path) == pytest.approx(2 / cores)


def test_throttling_of_both_versions_of_control_groups(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v2").mkdir()
    (tmp_path / "v1/cpu.stat").write_text("nr_throttled 3\nthrottled_time 500000000\n")
    (tmp_path / "v2/cpu.stat").write_text("nr_throttled 3\nthrottled_usec 250000\n")
    groups = [tmp_path / name for name in ("v1", "v2", "missing")]
    assert stragglers._throttled_seconds(lambda: groups) == pytest.approx(0.75)


def test_seconds_of_the_process():
    stat = processes.read_stat(os.getpid())
    before = stat.age_seconds
    time.sleep(0.02)
    assert before > 0
    assert 0.02 <= stat.age_seconds - before < 60
