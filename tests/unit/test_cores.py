"""Cores of a rank: affinity, binding by the launcher, quotas."""

import os

import pytest

from hvdtrain.job import cores


@pytest.mark.parametrize(
    ("mine", "launcher", "quotas", "local_size", "expected"),
    [
        (8, 8, [], 1, 8),
        (8, 8, [], 4, 2),
        (8, 8, [], 3, 2),
        (2, 2, [], 4, 1),
        (1, 2, [], 2, 1),  # bound to a core each: nothing left to divide
        (16, 32, [], 2, 16),  # bound to a socket each
        (16, 32, [], 8, 4),  # four ranks share a socket
        (64, 64, [4.0], 2, 2),
        (64, 64, [8.0, 1.5], 1, 1),
        (64, 64, [0.5], 1, 1),
    ],
)
def test_usable(monkeypatch, mine, launcher, quotas, local_size, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(mine)))
    monkeypatch.setattr(cores, "_launcher_cores", lambda default: launcher)
    monkeypatch.setattr(cores, "quotas", lambda: quotas)
    assert cores.usable(local_size) == expected


@pytest.mark.parametrize(
    ("quotas", "text"), [([], ""), ([24.0], ""), ([1.5, 8.0], "1.5 of 16 cores")]
)
def test_a_quota_is_described(monkeypatch, quotas, text):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(cores, "quotas", lambda: quotas)
    assert cores.describe_quota() == text


# Linux numbers the second threads of all cores after the first ones.
SOCKETS = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
SOCKETS |= {cpu + 4: place for cpu, place in SOCKETS.items()}


@pytest.mark.parametrize(
    ("cpus", "launcher", "local_size", "expected"),
    [
        (range(8), 8, 2, [{0, 4, 1, 5}, {2, 6, 3, 7}]),
        (range(8), 8, 4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (range(8), 8, 3, [{0, 4}, {1, 5, 2}, {6, 3, 7}]),
        ((1, 6), 2, 2, [{1}, {6}]),
        (range(8), 8, 1, [None]),
        (range(2), 2, 3, [None, None, None]),
        (range(2), 8, 2, [None, None]),  # bound by the launcher
    ],
)
def test_bind(monkeypatch, tmp_path, cpus, launcher, local_size, expected):
    for cpu, place in SOCKETS.items():
        directory = tmp_path / f"cpu{cpu}" / "topology"
        directory.mkdir(parents=True)
        for name, value in zip(("physical_package_id", "core_id"), place, strict=True):
            (directory / name).write_text(f"{value}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))
    monkeypatch.setattr(cores, "_launcher_cores", lambda default: launcher)
    monkeypatch.setattr(os, "listdir", lambda path: ["4321"])
    for local_rank, part in enumerate(expected):
        bound = {}
        monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
        cores.bind(local_rank, local_size, topology=tmp_path)
        assert {thread: set(cpus) for thread, cpus in bound.items()} == (
            {4321: part} if part else {}
        )


def test_bind_binds_this_process():
    everything = os.sched_getaffinity(0)
    try:
        cores.bind(0, len(everything))
        assert os.sched_getaffinity(0) <= everything
        assert len(os.sched_getaffinity(0)) == 1
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), everything)


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, []),
        ("0::/job/step\n", {"job/step/cpu.max": "max 100000"}, []),
        ("0::/job/step\n", {"job/step/cpu.max": "250000 100000"}, [2.5]),
        ("0::/job/step\n", {"job/cpu.max": "400000 100000"}, [4.0]),
        # In a container the host's path does not exist, and the mount is the group.
        ("0::/docker/0123\n", {"cpu.max": "100000 50000"}, [2.0]),
        (
            "4:memory:/job\n2:cpu,cpuacct:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "1e5"},
            [],
        ),
        (
            "4:memory:/job\n2:cpu,cpuacct:/job\n",
            {
                "cpu/job/cpu.cfs_quota_us": "300000",
                "cpu/job/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            [3.0],
        ),
    ],
)
def test_quotas(tmp_path, membership, files, expected):
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cores.quotas(tmp_path, tmp_path / "membership") == expected


def test_no_control_groups(tmp_path):
    assert cores.quotas(tmp_path, tmp_path / "missing") == []
