"""Cores of a rank: affinity, what the launcher has bound, quotas."""

import os

import pytest

from hvdtrain import cores


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
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, []),
        ("0::/job/step\n", {"job/step/cpu.max": "max 100000"}, []),
        ("0::/job/step\n", {"job/step/cpu.max": "250000 100000"}, [2.5]),
        ("0::/job/step\n", {"job/cpu.max": "400000 100000"}, [4.0]),
        # In a container the host's path means nothing, and the mount is the group.
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
