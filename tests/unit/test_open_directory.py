"""Files and directories that another user makes where this one looks."""

import contextlib
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time

import pytest

from hvdtrain.data.sources import index_cache
from hvdtrain.doctor import roll
from hvdtrain.flight import member, ring
from hvdtrain.flight.answer import Answer, Member
from hvdtrain.flight.shared_directory import SharedDirectory
from hvdtrain.install import cache
from hvdtrain.install.commands import InstallError
from hvdtrain.job import JobError
from hvdtrain.open_directory import OpenDirectory, open_regular

ROOT = pathlib.Path(__file__).parents[2]
NOBODY = 65534
LIMIT_SECONDS = 60
OLD = time.time() - 8 * 24 * 3600
# Names of ours, and names that a victim has.
OURS = ("member-x.json", "answer-x.json", "call.json", "conclusion.json")
NAMES = (*OURS, ".netrc", ".bashrc", "notes.txt")
JOIN = """
from hvdtrain.job import membership
membership.join(rank=0, size=1)
print("joined")
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user")


@contextlib.contextmanager
def another_user():
    """Run the block as a user without rights."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture(autouse=True)
def _limit():
    """End a test that blocks in a FIFO."""

    def fail(*_):
        pytest.fail("the test is blocked")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(2 * LIMIT_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def shared():
    """A directory as /tmp, in which all users write; `tmp_path` is private."""
    folder = pathlib.Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def victim(tmp_path):
    """A directory of this user that has not changed for a week."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text("content")
    os.utime(folder, (OLD, OLD))
    return folder


def link(path, victim):
    path.symlink_to(victim)


def directory_with_fifo(path, victim):
    path.mkdir()
    path.chmod(0o777)
    for name in OURS:
        os.mkfifo(path / name)


def directory_with_long_file(path, victim):
    path.mkdir()
    path.chmod(0o777)
    for name in OURS:
        (path / name).touch()
        os.truncate(path / name, 1 << 40)


def file(path, victim):
    path.write_text("content")


def fifo(path, victim):
    os.mkfifo(path)


def contents(folder):
    return {path.name: path.lstat() for path in folder.iterdir()}


@needs_root
@pytest.mark.parametrize("name", ["x", "10.0.0.1-1234"])
@pytest.mark.parametrize(
    "trap", [link, directory_with_fifo, directory_with_long_file, file, fifo]
)
def test_a_rank_joins_where_another_user_was_before(shared, victim, trap, name):
    """The name is that of an old job, or that of the job itself."""
    path = shared / f"hvdtrain-0-{name}"
    with another_user():
        trap(path, victim)
        os.utime(path, (OLD, OLD), follow_symlinks=False)
    before = contents(victim), contents(path) if trap in TRAPS else path.lstat()
    environment = os.environ | {
        "TMPDIR": str(shared),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234",
    }
    done = subprocess.run(
        [sys.executable, "-c", JOIN],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=True,
    )
    assert done.stdout == "joined\n"
    warning = f"A hang will be explained for each rank alone: received {path}, which"
    assert (warning in done.stderr) == (name != "x"), done.stderr
    assert before == (
        contents(victim),
        contents(path) if trap in TRAPS else path.lstat(),
    )


TRAPS = (directory_with_fifo, directory_with_long_file)


@needs_root
@pytest.mark.parametrize("trap", [link, *TRAPS])
def test_a_run_does_without_the_directory_of_another_user(shared, victim, trap):
    path = shared / "flight"
    with another_user():
        trap(path, victim)
    before = contents(path.resolve())
    found = SharedDirectory(path)
    this = Member(0, 1, "node0", os.getpid(), "/no.ring")
    assert found.members() == found.answers() == []
    assert found.current_roll_call() is None
    assert found.conclusion(within_seconds=LIMIT_SECONDS) == ""
    reason = r"belongs to another user|Not a directory"
    with pytest.raises(OSError, match=reason):
        found.add(this)
    with pytest.raises(OSError, match=reason):
        found.start_roll_call()
    found.write_answer("", Answer(this, "ended"))
    found.write_conclusion("text")
    found.remove(this)
    with pytest.warns(match=f"the ranks of each host alone: received {path}, which"):
        member.clear(shared)
    assert contents(path.resolve()) == before
    with pytest.raises(JobError, match=r"belongs to another|Received --job"):
        roll.report(str(shared))


@needs_root
def test_files_of_another_user_in_a_directory_of_this_one(shared):
    """The directory was open to all, as one of a shared run may have been."""
    path = shared / "flight"
    found = SharedDirectory(path)
    this = Member(0, 1, "node0", os.getpid(), "/no.ring")
    found.add(this)
    path.chmod(0o777)
    with another_user():
        os.mkfifo(path / "member-fifo.json")
        for name in ("answer-x.json", "conclusion.json", ".new-x-1-1"):
            (path / name).write_text("{}")
    (path / ".bashrc").write_text("of this user")
    assert found.members() == [this]
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    found.clear()
    assert sorted(os.listdir(path)) == [
        *(".bashrc", ".new-x-1-1", "answer-x.json", "conclusion.json"),
        "member-fifo.json",
    ]


def test_the_names_of_a_job_are_removed_and_no_others(victim):
    (victim / ".new-node0-1-1").touch()
    member.clear(victim.parent)
    assert len(contents(victim)) == len(NAMES) + 1
    victim.rename(victim.parent / "flight")
    member.clear(victim.parent)
    kept = {*NAMES} - {*OURS}
    assert set(contents(victim.parent / "flight")) == kept


@pytest.mark.parametrize("flags", ["r", "w", "a", "a+", "r+"])
def test_only_regular_files_are_opened(tmp_path, victim, flags):
    (tmp_path / "link").symlink_to(victim / "notes.txt")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("link", "fifo", "folder", "/dev/zero"):
        with (
            pytest.raises(OSError, match=r"link|regular|directory|No such device"),
            open(tmp_path / name, flags, opener=open_regular),
        ):
            pass
    assert (victim / "notes.txt").read_text() == "content"
    with open(victim / "notes.txt", flags, opener=open_regular) as opened:
        if "r" not in flags:
            opened.write("new")
    expected = {"w": "new", "a": "contentnew", "a+": "contentnew"}
    assert (victim / "notes.txt").read_text() == expected.get(flags, "content")


def test_a_file_that_is_too_long_is_not_read(tmp_path):
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 1 << 40)
    (tmp_path / "short").write_text("text")
    with OpenDirectory(tmp_path) as files:
        assert files.read("short") == "text"
        with pytest.raises(OSError, match="too large"):
            files.read("long")


def test_operations_are_on_the_directory_that_was_opened(tmp_path, victim):
    before = contents(victim)
    path = tmp_path / "own"
    with OpenDirectory(path, make=True) as files:
        path.rename(tmp_path / "moved")
        path.symlink_to(victim)
        for name in ("notes.txt", "call.json"):
            files.write(name, "new")
        assert files.names() == ["call.json", "notes.txt"]
        files.remove("notes.txt")
    assert contents(victim) == before
    assert os.listdir(tmp_path / "moved") == ["call.json"]


@needs_root
def test_a_ring_of_another_user_is_not_read(shared):
    data = bytearray(ring.HEADER_BYTES + ring.RECORDS * ring.RECORD_BYTES)
    data[:8] = ring.FORMAT.to_bytes(8, "little")
    (shared / "own.ring").write_bytes(data)
    with another_user():
        (shared / "foreign.ring").write_bytes(data)
        os.mkfifo(shared / "fifo.ring")
        (shared / "link.ring").symlink_to(shared / "own.ring")
    assert ring.read_moment(shared / "own.ring")
    for name in ("foreign", "fifo", "link"):
        assert ring.read(shared / f"{name}.ring") is None
        assert ring.read_moment(shared / f"{name}.ring") is None


@needs_root
@pytest.mark.parametrize("trap", [link, directory_with_fifo])
def test_the_installer_refuses_the_directory_of_another_user(
    monkeypatch, shared, victim, trap
):
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    path = cache.temporary("name.lock").parent
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.rmdir()
    with another_user():
        trap(path, victim)
    before = contents(victim)
    with pytest.raises(InstallError, match=f"Received {path}, which .* another dir"):
        cache.temporary("name.lock")
    assert contents(victim) == before


def test_a_lock_of_an_index_is_no_link_and_no_fifo(monkeypatch, tmp_path, victim):
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path))
    path = index_cache._path("ab12")
    path.parent.mkdir(parents=True)
    path.with_suffix(".lock").symlink_to(victim / "notes.txt")
    os.mkfifo(path)
    made = index_cache.cached("ab12", lambda: index_cache.np.arange(3))
    assert list(made) == [0, 1, 2]
    assert (victim / "notes.txt").read_text() == "content"
