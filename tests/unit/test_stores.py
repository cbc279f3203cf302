"""Runs whose model_dir is the address of a store, here fsspec's store in memory."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys
import threading
import uuid
from unittest import mock

import fsspec
import keras
import numpy as np
import pytest
from toy import X, Y

from hvdtrain import training
from hvdtrain.checkpoint.directories import StoreDirectory
from hvdtrain.checkpoint.header import Checkpoint, Header
from hvdtrain.checkpoint.storage import CheckpointFiles
from hvdtrain.checkpoint.writing import (
    BackgroundWriter,
    TieredWriter,
    wait_for_writer,
)
from hvdtrain.job import JobError, World, agreement
from hvdtrain.job.world import PreemptedError
from hvdtrain.report import runs
from hvdtrain.stores import lease, mirror, object_store
from hvdtrain.stores.lease import Lease
from hvdtrain.stores.mirror import Mirror, local_directory
from hvdtrain.stores.object_store import ObjectStore, StoreError
from hvdtrain.training import LatestExporter, RunConfig, run_directory

pytestmark = pytest.mark.usefixtures("one_rank")
FILES = fsspec.filesystem("memory")
HEADER = Header(
    step=2,
    local_batch_sizes=(4,),
    global_batch_size=4,
    sample=8,
    original_size=1,
    fit_epoch_steps=6,
    steps_per_execution=1,
)


@pytest.fixture
def address(monkeypatch):
    """A new address; what this process has mirrored of others is forgotten."""
    monkeypatch.setattr(mirror, "_mirrors", {})
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def store(address):
    return ObjectStore(address, sleep=lambda seconds: None)


def network():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, run_eagerly=True)
    return model


def fit(model_dir, max_steps, **options):
    return training.fit(
        network,
        (X, Y),
        global_batch_size=4,
        max_steps=max_steps,
        model_dir=model_dir,
        seed=1,
        world=World(),
        **{"save_every_steps": 2, "observers": [object()], **options},
    )


def steps(address):
    return CheckpointFiles(StoreDirectory(f"{address}/checkpoints")).steps()


def forget():
    """Forget what a process knows of addresses, as its end does."""
    mirror._mirrors.clear()


def assert_equal(result, expected):
    for got, wanted in zip(
        result.model.get_weights(), expected.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def test_a_job_continues_from_a_store_as_from_a_disk(address, tmp_path):
    expected = fit(
        tmp_path / "disk", 9, exporters=[LatestExporter()], validation=(X, Y)
    )
    fit(address, 5)
    forget()
    result = fit(
        address, 9, exporters=[LatestExporter()], validation=(X, Y), observers=None
    )
    assert result.start_step == 5
    assert result.start.checkpoint == f"{address}/checkpoints/step-00000005.json"
    assert_equal(result, expected)
    names = set(ObjectStore(address).sizes())
    assert {"log.jsonl", "export/latest/step-00000009/saved_model.pb"} <= names
    assert steps(address) == [9, 8, 6, 5, 4]
    # The same arrays as on a disk, and the program that reads its log.
    stored = CheckpointFiles(StoreDirectory(f"{address}/checkpoints")).read(9)
    on_disk = CheckpointFiles(tmp_path / "disk/checkpoints").read(9)
    # The names have the numbers of the layers in this process.
    arrays = zip(stored.arrays.values(), on_disk.arrays.values(), strict=True)
    for array, other in arrays:
        np.testing.assert_array_equal(array, other)
    (logged,) = runs.read([address])
    assert logged.lines[-1]["step"] == 9


def test_model_and_summary_are_written_to_the_store(address):
    config = RunConfig(model_dir=pathlib.Path(address))
    assert config.model_dir == address
    run_directory.write(World(), address, model=network(), summary={"loss": 1.0})
    assert json.loads(ObjectStore(address).read("summary.json")) == {"loss": 1.0}
    assert "model.keras" in ObjectStore(address).sizes()


@pytest.mark.long
def test_a_job_continues_from_the_newest_of_the_disk_and_the_store(address, tmp_path):
    options = {"local_dir": str(tmp_path / "local"), "upload_every_steps": 4}
    options |= {"keep_max": 2, "save_every_steps": 1}
    expected = fit(tmp_path / "disk", 12)
    fit(address, 7, **options)
    disk = CheckpointFiles(tmp_path / "local/checkpoints")
    assert steps(address)[0] == disk.steps()[0] == 7
    # Newer than the store's, as after a kill between two uploads.
    FILES.rm(f"{address}/checkpoints/step-00000007.json")
    forget()
    result = fit(address, 9, **options)
    assert result.start.checkpoint == str(disk.path(7))
    # On another host, there is no local directory.
    forget()
    result = fit(address, 12, **options | {"local_dir": str(tmp_path / "other")})
    assert result.start.checkpoint == f"{address}/checkpoints/step-00000009.json"
    assert_equal(result, expected)


class Receiver:
    """In place of a `BackgroundWriter`: the steps that it was given."""

    def __init__(self):
        self.steps = []
        self.is_idle = True

    def submit(self, checkpoint, **options):
        self.steps.append(checkpoint.step)

    def is_done(self, timeout_seconds=None):
        return self.is_idle


def test_checkpoints_go_to_the_disk_often_and_to_the_store_seldom():
    disk, store, now = Receiver(), Receiver(), [0.0]
    writer = TieredWriter(
        disk,
        store,
        every_steps=4,
        every_seconds=60,
        start_step=2,
        clock=lambda: now[0],
    )

    def submit(*steps, **options):
        for step in steps:
            checkpoint = Checkpoint(
                header=dataclasses.replace(HEADER, step=step), arrays={}
            )
            writer.submit(checkpoint, copy_seconds=0.0, **options)

    submit(3, 4, 5, 6)
    assert store.steps == [4]
    # An upload that is due while one is in progress waits for the next checkpoint.
    store.is_idle = False
    submit(8, 9)
    store.is_idle = True
    submit(10, 11)
    assert store.steps == [4, 10]
    now[0] = 60.0
    submit(11, 11)
    assert store.steps == [4, 10, 11]
    submit(11, is_last=True)
    assert store.steps == [4, 10, 11, 11]
    assert disk.steps == [3, 4, 5, 6, 8, 9, 10, 11, 11, 11, 11]


def test_at_most_one_checkpoint_is_being_written_and_others_are_counted(monkeypatch):
    written, reports, now = threading.Event(), [], [0.0]
    files = mock.Mock()
    files.write.side_effect = lambda checkpoint: "" if written.wait(60) else "late"
    writer = BackgroundWriter(
        files,
        lambda step, text: reports.append((step, text)),
        on_failure=pytest.fail,
        clock=lambda: now[0],
    )

    def submit(step):
        header = dataclasses.replace(HEADER, step=step)
        writer.submit(Checkpoint(header=header, arrays={}), copy_seconds=0.25)

    for step in (1, 2, 3, 4):
        submit(step)
    monkeypatch.setattr(agreement, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(agreement, "gather", lambda world, value: [value])
    now[0] = 40.0

    def release(step, text):
        reports.append((step, text))
        written.set()

    # The first wait is reported, once.
    writer._report = release
    wait_for_writer(World(), writer)
    submit(5)
    wait_for_writer(World(), writer)
    assert files.write.call_count == 2
    assert reports == [
        (2, mock.ANY),
        (1, "is being written for 40 s, and the job waits for it"),
        (1, "copied in 0.250 s, written in 40.0 s"),
        (5, "copied in 0.250 s, written in 0.0 s, after 3 were left out"),
    ]
    assert reports[0][1].startswith("not written: the one before is still being")


def test_a_checkpoint_that_is_damaged_on_the_disk_is_read_from_the_store(
    address, tmp_path
):
    options = {"local_dir": str(tmp_path / "local"), "upload_every_steps": 1}
    fit(address, 4, **options)
    (arrays,) = (tmp_path / "local/checkpoints").glob("step-00000004-*")
    arrays.write_bytes(arrays.read_bytes()[:-1])
    forget()
    assert fit(address, 6, **options).start_step == 4


def test_a_local_directory_of_another_run(address, tmp_path):
    local_directory(address, str(tmp_path))
    with pytest.raises(JobError, match=rf"^Received local_dir={tmp_path}.*{address}"):
        local_directory(f"{address}2", str(tmp_path))
    with pytest.raises(JobError, match=r"^Received local_dir=.* expected a model_dir"):
        RunConfig(model_dir=str(tmp_path), local_dir=str(tmp_path))


class Failing:
    """Raises errors in place of some calls of a file system's method."""

    def __init__(self, monkeypatch, method, errors, *, after=False):
        # Of the class: each thread has an instance.
        call = getattr(type(FILES), method)

        def failing(*arguments, **options):
            if errors and after:
                call(*arguments, **options)
            if errors:
                raise errors.pop(0)
            return call(*arguments, **options)

        monkeypatch.setattr(type(FILES), method, failing)


def test_errors_that_may_be_temporary_are_repeated(store, monkeypatch):
    Failing(monkeypatch, "pipe_file", [OSError("503"), TimeoutError("slow")])
    store.write("a", b"1")
    assert store.read("a") == b"1"
    # The put has succeeded, and the response was lost.
    Failing(monkeypatch, "pipe_file", [ConnectionError("cut")], after=True)
    assert store.create("b", b"1")
    assert not store.create("b", b"2")


def test_errors_that_stay_are_one_line(store, monkeypatch):
    Failing(monkeypatch, "pipe_file", [OSError("503 slow\ndown")] * 6)
    with pytest.raises(StoreError, match=f"^Cannot write {store}/a: OSError: 503 s"):
        store.write("a", b"")
    Failing(monkeypatch, "cat_file", [PermissionError("Forbidden")])
    with pytest.raises(StoreError, match="Forbidden"):
        store.read("a")
    with pytest.raises(
        StoreError, match=r"^Cannot open no://a/b: .*Protocol not known"
    ):
        ObjectStore("no://a/b")


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(StoreError, match=r"pip install 'hvdtrain\[s3\]'\.$"):
        ObjectStore("s3://bucket/run")


def without_repetitions(monkeypatch):
    monkeypatch.setattr(object_store, "_RETRY_SECONDS", ())


class Reports:
    """An observer that keeps what is reported of checkpoints."""

    def __init__(self):
        self.texts = []

    def on_checkpoint(self, step, text):
        self.texts.append(text)


def test_a_failed_save_is_reported_and_the_job_goes_on(address, monkeypatch):
    without_repetitions(monkeypatch)
    Failing(monkeypatch, "put_file", [OSError("503")])
    reports = Reports()
    fit(address, 5, observers=[reports])
    assert reports.texts[0].startswith(f"not written: Cannot write {address}")
    assert steps(address)[0] == 5
    assert 2 not in steps(address)


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(address, monkeypatch):
    without_repetitions(monkeypatch)
    Failing(monkeypatch, "put_file", [OSError("503")] * 2)
    with pytest.raises(JobError, match=rf"Cannot write {address}/checkpoints"):
        fit(address, 2)


def test_arrays_whose_header_is_listed_late_are_kept(address, monkeypatch):
    files = CheckpointFiles(StoreDirectory(f"{address}/checkpoints"))
    fit(address, 4)
    find = FILES.find

    def late(path, **options):
        return {n: i for n, i in find(path, **options).items() if "04.json" not in n}

    with monkeypatch.context() as patch:
        patch.setattr(FILES, "find", late)
        assert files.steps() == [2]
        with pytest.warns(UserWarning, match="step-00000004-.* is not used"):
            files.prepare()
    assert files.read(4).step == 4


def test_a_checkpoint_of_the_same_step_is_replaced(address):
    fit(address, 4)
    files = CheckpointFiles(StoreDirectory(f"{address}/checkpoints"))
    before = files.read(4)
    changed = {name: array + 1 for name, array in before.arrays.items()}
    files.write(Checkpoint(header=before.header, arrays=changed))
    for name, array in files.read(4).arrays.items():
        np.testing.assert_array_equal(array, changed[name])


@contextlib.contextmanager
def held(store, **options):
    with Lease(store, warn=lambda text: None, **options) as taken:
        yield taken


def on_another_machine(monkeypatch):
    describe = lease._describe_process
    monkeypatch.setattr(
        lease, "_describe_process", lambda: describe() | {"machine": "another"}
    )


def test_a_second_job_is_refused_while_the_first_one_renews(store, monkeypatch):
    warnings = []
    with held(store):
        on_another_machine(monkeypatch)

        def renew(seconds):
            # In place of the thread, and later by the store's clock.
            store.write(".lease/00000001", store.read(".lease/00000001"))

        second = Lease(store, warn=warnings.append, sleep=renew)
        with pytest.raises(JobError, match=f"in use .*process {os.getpid()} on "):
            second.__enter__()
    assert len(warnings) == 1
    # It has ended: no wait.
    with held(store, sleep=None):
        pass


def test_a_lease_that_is_not_renewed_ends(store, monkeypatch):
    pauses = []
    with held(store, seconds=60) as first:
        on_another_machine(monkeypatch)
        with held(store, seconds=60, sleep=pauses.append) as second:
            assert 59 < sum(pauses) <= 60
            second.check()
            # It was only stopped: it writes no more.
            with pytest.raises(JobError, match="in use by another job"):
                first.check()
        for _ in range(3):
            with held(store, sleep=None):
                pass
        with pytest.raises(JobError, match="in use by another job"):
            first.check()


@pytest.mark.parametrize("content", [b"[" * 200_000, b"[]", b"7", b"\xff", b""])
def test_a_damaged_lease_ends_by_its_time(store, content):
    store.write(".lease/00000001", content)
    pauses = []
    with held(store, seconds=60, sleep=pauses.append) as second:
        assert 59 < sum(pauses) <= 60
        second.check()


def test_a_lease_of_a_process_that_was_killed_here_ends_at_once(store):
    process = subprocess.Popen([sys.executable, "-c", ""])
    machine = lease._describe_process()["machine"]
    content = {"process": process.pid, "started": "0", "machine": machine}
    content["address"] = store.address
    process.wait()
    store.write(".lease/00000007", json.dumps(content).encode())
    with held(store, sleep=None):
        assert ".lease/00000008" in store.sizes()


def test_a_lease_that_was_copied_with_a_run_ends_by_its_time(store):
    """The job that holds the lease of the other address runs here."""
    content = lease._describe_process() | {"address": "memory://other/run"}
    content["process"] = os.getppid()
    content["started"] = lease._start_of(os.getppid())
    store.write(".lease/00000003", json.dumps(content).encode())
    pauses = []
    with held(store, sleep=pauses.append):
        assert sum(pauses) > 59


def test_uploads_of_the_last_holder_are_aborted(store, monkeypatch):
    """Not later ones: a user may copy a run to the address."""
    before = []
    monkeypatch.setattr(store, "abort_uploads", before.append)
    for _ in range(2):
        with held(store):
            pass
    written = store.modified(".lease/00000001")
    # A process that was killed, which cannot be seen to run.
    content = lease._describe_process() | {"address": store.address, "started": "0"}
    content["process"] = os.getppid()
    store.write(".lease/00000002", json.dumps(content).encode())
    with held(store, seconds=60):
        pass
    assert before == [written, store.modified(".lease/00000002") + 60]


def test_of_two_jobs_that_take_a_lease_one_gets_it(store, monkeypatch):
    first, second = (Lease(store, warn=lambda text: None) for _ in range(2))
    # Both have seen that nobody holds it.
    monkeypatch.setattr(Lease, "_last", lambda self: 0)
    with first, pytest.raises(JobError, match="in use"):
        second.__enter__()


def test_a_lease_that_is_listed_late_is_found(store, monkeypatch):
    with held(store), held_elsewhere(store, monkeypatch):
        pass


@contextlib.contextmanager
def held_elsewhere(store, monkeypatch):
    on_another_machine(monkeypatch)
    monkeypatch.setattr(ObjectStore, "sizes", lambda self, prefix="": {})
    pauses = []
    with held(store, sleep=pauses.append):
        assert pauses
        yield


def test_a_writer_without_its_lease_replaces_nothing(address, store):
    with held(store) as first:
        store.write(".lease/00000002", b"{}")
        files = CheckpointFiles(
            StoreDirectory(f"{address}/checkpoints", check_writer=first.check)
        )
        with pytest.raises(JobError, match="in use by another job"):
            files.write(Checkpoint(header=HEADER, arrays={"a": np.zeros(2)}))
    assert not files.steps()


def test_a_mirror_uploads_what_has_changed_and_deletes_what_is_gone(store, tmp_path):
    sent = []
    upload = store.upload
    store.upload = lambda path, name: (sent.append(name), upload(path, name))
    copies = Mirror(tmp_path, store)
    export = tmp_path / "export/best/step-00000003"
    export.mkdir(parents=True)
    for name in ("saved_model.pb", "variables"):
        (export / name).write_text(name)
    (tmp_path / ".partial-1").write_text("")
    (tmp_path / "log.jsonl").write_text("1\n")
    copies.sync()
    # Without its saved_model.pb, an export cannot be loaded.
    assert sent[-1] == "export/best/step-00000003/saved_model.pb"
    assert sorted(sent) == sorted(store.sizes())
    copies.sync()
    assert len(sent) == 3
    for path in export.iterdir():
        path.unlink()
    export.rmdir()
    (tmp_path / "log.jsonl").write_text("1\n2\n")
    copies.sync()
    assert store.sizes() == {"log.jsonl": 4}


def test_a_run_on_another_host_continues_the_log_and_knows_the_exports(store, tmp_path):
    store.write("log.jsonl", b"1\n2\n")
    for step in ("step-00000003", "step-00000006"):
        store.write(f"export/best/{step}/variables", b"1")
    store.write("export/best/step-00000003/saved_model.pb", b"1")
    # The upload of step 6 was killed before its last file, or is a copy in progress.
    own = ["export/README.md", "export/best/step-1/a", "export/mine/model.tflite"]
    for name in own:
        store.write(name, b"1")
    copies = Mirror(tmp_path, store)
    copies.fetch()
    assert (tmp_path / "log.jsonl").read_text() == "1\n2\n"
    assert [path.name for path in (tmp_path / "export/best").iterdir()] == [
        "step-00000003"
    ]
    names = set(store.sizes())
    copies.sync()
    assert set(store.sizes()) == names
    # A later one that is complete supersedes it.
    store.write("export/best/step-00000009/saved_model.pb", b"1")
    copies.fetch()
    copies.sync()
    assert set(store.sizes()) == {
        *own,
        *(f"export/best/step-00000003/{n}" for n in ("saved_model.pb", "variables")),
        "export/best/step-00000009/saved_model.pb",
        "log.jsonl",
    }


def test_a_job_that_has_lost_its_lease_uploads_nothing(store, tmp_path):
    def lost():
        raise JobError("in use by another job.")

    copies = Mirror(tmp_path, store)
    (tmp_path / "log.jsonl").write_text("1\n")
    with pytest.raises(JobError, match="in use by another"), copies.uploading(lost):
        pass
    assert not store.sizes()
    # The error of the block is the one that is raised.
    with (
        pytest.warns(UserWarning, match="in use by another job"),
        pytest.raises(KeyError),
        copies.uploading(lost),
    ):
        raise KeyError
    with copies.uploading(lambda: None):
        pass
    assert store.sizes() == {"log.jsonl": 2}


def test_a_bucket_that_is_missing_is_one_line(store, tmp_path, monkeypatch):
    for method in ("pipe_file", "put_file"):
        Failing(monkeypatch, method, [FileNotFoundError("no bucket")] * 2)
    with pytest.raises(StoreError, match=f"^Cannot write {store}/a: .*no bucket"):
        store.write("a", b"")
    (tmp_path / "log.jsonl").write_text("1\n")
    kept = f"no bucket.* The files are kept in {tmp_path}.$"
    with pytest.raises(StoreError, match=kept):
        Mirror(tmp_path, store).sync()


def test_a_job_that_waited_for_another_one_continues_its_log(address):
    directory = local_directory(address)
    assert not list(directory.iterdir())
    ObjectStore(address).write("log.jsonl", b"1\n")
    for name in ("rank-1.json", "notes.txt"):
        ObjectStore(address).write(f"errors/{name}", b"{}")
    with run_directory.claimed(RunConfig(model_dir=address)):
        assert (directory / "log.jsonl").read_text() == "1\n"
    # Those of this run, after those of the last one were deleted.
    with (
        pytest.raises(KeyError),
        run_directory.claimed(RunConfig(model_dir=address)),
        run_directory.recorded(address, World()),
    ):
        raise KeyError
    assert {"errors/notes.txt", "errors/rank-0.json", "log.jsonl"} == {
        name for name in ObjectStore(address).sizes() if ".lease" not in name
    }


def test_one_process_has_one_local_directory(address, tmp_path):
    training.make_observers(io.StringIO(), model_dir=address)
    with pytest.raises(
        JobError, match=f"^Received local_dir={tmp_path}/a for {address}"
    ):
        local_directory(address, f"{tmp_path}/a")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (pathlib.Path("s3://a/b"), "s3://a/b"),
        ("hdfs:///a", "hdfs:///a"),
        # Paths of this machine.
        ("file:///a/b", "/a/b"),
        (pathlib.Path("file:///a/b"), "/a/b"),
        ("local:/a:/b", "/a:/b"),
    ],
)
def test_addresses_are_kept(path, expected):
    assert RunConfig(model_dir=path).model_dir == expected


@pytest.mark.parametrize(
    "address",
    ["memory://a//run", "simplecache::memory://a/run", "file://a/b"],
)
def test_addresses_that_are_refused(address):
    """They are no directories here, and do not start anew beside what is there."""
    with pytest.raises(JobError, match=rf"^Received {address}; expected .*s3://bucket"):
        fit(address, 2)


def test_a_store_that_ends_with_the_process_is_named(address):
    with (
        pytest.warns(UserWarning, match=f"^{address} is in the memory of rank 0"),
        run_directory.claimed(RunConfig(model_dir=address)),
    ):
        pass


def test_a_preempted_job_that_cannot_upload_its_log_is_preempted(address, monkeypatch):
    def failing(self, *args):
        raise StoreError("Cannot write the log.")

    monkeypatch.setattr(Mirror, "sync", failing)
    with (
        pytest.warns(UserWarning, match="Cannot write the log"),
        pytest.raises(PreemptedError),
    ):
        fit(address, 50, max_minutes=1e-6)
    assert steps(address)
    with pytest.raises(JobError, match="Cannot write the log"):
        fit(address, 5)


def test_other_objects_beside_a_lease_are_ignored(store, monkeypatch):
    """Consoles and copying programs write markers of folders."""
    found = {".lease/": 0, ".lease/notes": 1, ".lease/00000009.bak": 1}
    monkeypatch.setattr(ObjectStore, "sizes", lambda self, prefix="": found)
    with held(store):
        monkeypatch.undo()
        assert ".lease/00000001" in store.sizes()


def test_a_lease_that_is_missing_for_a_moment_is_kept(store, monkeypatch):
    with held(store) as first:
        read = store.read
        missing = [".lease/00000001"]

        def read_late(name):
            if name in missing:
                missing.remove(name)
                raise FileNotFoundError(name)
            return read(name)

        monkeypatch.setattr(store, "read", read_late)
        first.check()
        assert not missing
        first.check()


def test_a_store_that_denies_deletion(address, store, monkeypatch):
    denied = []

    def deny(path):
        denied.append(path)
        raise PermissionError("AccessDenied")

    monkeypatch.setattr(type(FILES), "rm_file", lambda self, path: deny(path))
    files = CheckpointFiles(StoreDirectory(f"{address}/checkpoints"), keep_max=1)
    for step in range(2, 12, 2):
        header = dataclasses.replace(HEADER, step=step)
        files.write(Checkpoint(header=header, arrays={"a": np.ones(3)}))
    # One attempt for each superseded checkpoint.
    assert len(denied) == 4
    assert files.read(2).step == 2
    store.write("errors/rank-0.json", b"{}")
    with (
        pytest.warns(UserWarning, match=r"^Cannot delete .*rank-0\.json: Perm"),
        run_directory.recorded(address, World()),
    ):
        pass


def test_the_place_of_files_that_were_not_uploaded_is_printed(store, tmp_path):
    def refused():
        raise StoreError("Cannot read .lease/00000001: Forbidden.")

    kept = f"Forbidden. The files are kept in {tmp_path}.$"
    with (
        pytest.raises(StoreError, match=kept),
        Mirror(tmp_path, store).uploading(refused),
    ):
        pass
