"""Which path reduces gradients, and what is in the way of the native one."""

import contextlib
import ctypes
import errno
import os
import signal
from unittest import mock

import pytest

import hvdtrain.keras as hvd
from hvdtrain import environment, native
from hvdtrain.collectives.transport import connection, links, segment
from hvdtrain.collectives.transport.places import RankPlace, RankPlaces


@pytest.fixture(autouse=True)
def _forgotten():
    hvd.init()
    connection.disconnect()
    yield
    connection.disconnect()


@pytest.fixture
def two_ranks(monkeypatch):
    """This process as rank 0 of two, whose other rank says the same."""
    monkeypatch.setattr(connection.hvd, "size", lambda: 2)
    monkeypatch.setattr(connection.hvd, "local_size", lambda: 2)
    monkeypatch.setattr(connection, "_gather", twice)


def twice(value):
    """What two ranks of one host say, of which this one says `value`."""
    if len(value) < 3:
        return [value, value]
    *before, place, key = value
    return [value, (*before, {**place, "local_rank": 1}, key)]


def test_one_rank_has_nothing_to_reduce():
    assert connection.reduction_path() == "Horovod"
    assert connection.connect().obstacle == "the job has one rank"


def test_unknown_choice_is_an_error(monkeypatch):
    monkeypatch.setenv("HVDTRAIN_REDUCTION", "shm")
    with pytest.raises(ValueError, match="HVDTRAIN_REDUCTION=shm; expected one of"):
        connection.connect()


def test_empty_choice_is_the_default(monkeypatch):
    monkeypatch.setenv("HVDTRAIN_REDUCTION", "")
    assert environment.reduction_choice() == "auto"


@pytest.mark.parametrize(
    ("name", "value", "obstacle"),
    [
        ("HVDTRAIN_REDUCTION", "horovod", "HVDTRAIN_REDUCTION=horovod"),
        ("HOROVOD_ELASTIC", "1", "elastic"),
    ],
)
def test_environment_chooses_horovod(monkeypatch, two_ranks, name, value, obstacle):
    monkeypatch.setenv(name, value)
    assert connection.reduction_path() == "Horovod"
    assert obstacle in connection.connect().obstacle


@pytest.mark.parametrize("choice", ["auto", "native"])
def test_mpi_keeps_a_network_that_is_faster_than_tcp(
    monkeypatch, two_ranks, tmp_path, choice
):
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(links, "_DEVICES", (tmp_path / "missing", tmp_path))
    monkeypatch.setattr(connection.hvd, "local_size", lambda: 1)
    monkeypatch.setattr(connection.hvd, "mpi_enabled", lambda: True)
    monkeypatch.setenv("HVDTRAIN_REDUCTION", choice)
    kept = "MPI connects the hosts, by mlx5_0 if it can" if choice == "auto" else ""
    assert connection._obstacle() == kept


def test_native_reductions_that_are_asked_for_are_not_replaced(monkeypatch, two_ranks):
    monkeypatch.setenv("HVDTRAIN_REDUCTION", "native")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    expected = "HVDTRAIN_REDUCTION=native is not possible: the job is elastic"
    with pytest.raises(RuntimeError, match=expected):
        connection.connect()


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"OMPI_MCA_btl_tcp_if_include": "eth9,127.0.0.0/8"}, "127.0.0.1"),
        (
            {"OMPI_MCA_btl_tcp_if_include": "eth9", "HOROVOD_GLOO_IFACE": "lo"},
            "127.0.0.1",
        ),
    ],
)
def test_peers_use_the_network_that_the_launcher_names(monkeypatch, variables, address):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(links.PeerListener()) as listener:
        assert listener.address[0] == address


@pytest.fixture
def _unloaded():
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.mark.usefixtures("_unloaded")
def test_missing_library_is_an_obstacle(monkeypatch, two_ranks, tmp_path):
    monkeypatch.setattr(native.record, "find_package", lambda name: None)
    with pytest.warns(UserWarning, match="through Horovod, which is slower: .*missing"):
        obstacle = connection.connect().obstacle
    assert (
        "The package hvdtrain_native is missing: python -m hvdtrain.install" in obstacle
    )


@pytest.mark.usefixtures("_unloaded")
@pytest.mark.parametrize(("rank", "choice"), [(1, "auto"), (0, "horovod")])
def test_one_rank_warns_unless_horovod_was_chosen(
    monkeypatch, two_ranks, tmp_path, recwarn, rank, choice
):
    monkeypatch.setattr(native.record, "find_package", lambda name: None)
    monkeypatch.setattr(connection.hvd, "rank", lambda: rank)
    monkeypatch.setenv("HVDTRAIN_REDUCTION", choice)
    assert connection.connect().obstacle
    assert not recwarn.list


@pytest.mark.usefixtures("_unloaded")
def test_library_that_does_not_load_is_an_obstacle(monkeypatch, two_ranks, tmp_path):
    broken = tmp_path / "libhvdtrain.so"
    broken.write_text("no library")
    monkeypatch.setattr(native, "library_path", lambda: broken)
    with pytest.warns(UserWarning, match="through Horovod"):
        assert f"{broken}: " in connection.connect().obstacle


@pytest.mark.usefixtures("_unloaded")
def test_library_of_another_version_is_an_obstacle(monkeypatch, two_ranks):
    monkeypatch.setattr(native, "INTERFACE", -1)
    with pytest.warns(UserWarning, match="through Horovod"):
        obstacle = connection.connect().obstacle
    assert "is of another version of hvdtrain: python -m hvdtrain.install" in obstacle


def test_ranks_with_different_interfaces_reduce_through_horovod(monkeypatch, two_ranks):
    def gather(value):
        # Nothing else of another version has a known form.
        return [value, (13, "", {"unknown": 0}, "")]

    monkeypatch.setattr(connection, "_gather", gather)
    with pytest.warns(UserWarning, match="through Horovod"):
        obstacle = connection.connect().obstacle
    assert f"rank 0 has interface {native.INTERFACE} of" in obstacle
    assert "rank 1 has 13; install the same hvdtrain on all hosts" in obstacle


@pytest.mark.usefixtures("_unloaded")
def test_library_for_another_tensorflow_is_an_obstacle(monkeypatch, two_ranks):
    built_for = native.tf.__version__
    monkeypatch.setattr(native.tf, "__version__", "2.99.0")
    # It has another ABI: to load it may end the process.
    monkeypatch.setattr(native.tf, "load_op_library", pytest.fail)
    with pytest.warns(UserWarning, match="through Horovod"):
        obstacle = connection.connect().obstacle
    assert f"built for TensorFlow {built_for}, and 2.99.0 is installed" in obstacle


def test_an_obstacle_of_another_rank_alone_is_warned_of(monkeypatch, two_ranks):
    def gather(value):
        interface, _, *rest = value
        return [value, (interface, "hvdtrain_native is missing", *rest)]

    monkeypatch.setattr(connection, "_gather", gather)
    with pytest.warns(
        UserWarning, match=r"slower: hvdtrain_native is missing \(rank 1"
    ):
        connection.connect()


def test_full_memory_is_an_obstacle(monkeypatch, two_ranks):
    def no_space(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(segment.os, "posix_fallocate", no_space)
    before = set(os.listdir("/dev/shm"))
    with pytest.warns(UserWarning, match="through Horovod"):
        obstacle = connection.connect().obstacle
    assert "bytes of shared memory: /dev/shm: No space left" in obstacle
    assert set(os.listdir("/dev/shm")) <= before


def test_no_memory_is_reserved_before_all_ranks_are_ready(monkeypatch, two_ranks):
    # A rank that is killed while another one loads TensorFlow would leave it behind.
    reserved = mock.Mock()
    monkeypatch.setattr(segment, "reserve", reserved)

    def gather(value):
        raise KeyboardInterrupt

    monkeypatch.setattr(connection, "_gather", gather)
    with pytest.raises(KeyboardInterrupt):
        connection.connect()
    reserved.assert_not_called()


def test_second_directory_is_used_where_the_first_is_full(monkeypatch, tmp_path):
    directories = ["/nowhere", str(tmp_path)]
    monkeypatch.setattr(segment, "_directories", lambda: directories)
    with contextlib.closing(segment._reserved_file(1 << 16)) as file:
        assert os.path.dirname(file.name) == str(tmp_path)
        assert os.stat(file.name).st_blocks * 512 >= 1 << 16
    assert not list(tmp_path.iterdir())


def test_another_ranks_obstacle_is_one_of_all(monkeypatch, two_ranks):
    said = ["", "cannot map it"]
    monkeypatch.setattr(segment, "attach", lambda *args, **kwargs: "")
    monkeypatch.setattr(
        connection, "_gather", lambda value: said if value == "" else twice(value)
    )
    assert connection.connect().obstacle == "cannot map it (rank 1)"
    assert not connection.connect().operations


@pytest.mark.parametrize(
    ("cores", "quotas", "is_shared"),
    [
        ([[0], [0]], [], True),
        ([[0], [5]], [], False),
        ([[0], [5]], [2.0], False),
        ([[0, 5], [0, 5]], [16.0, 1.0], True),  # docker run --cpus=1
    ],
)
def test_ranks_spin_where_each_has_a_core(cores, quotas, is_shared):
    by_rank = [
        RankPlace("host0", 0, number, each, quotas) for number, each in enumerate(cores)
    ]
    # A rank of another host takes no core of this one.
    by_rank.append(RankPlace("host1", 1, 0, [0], []))
    assert RankPlaces(by_rank, rank=1).is_core_shared == is_shared


def places_of(hosts, rank=0, names=None):
    """The places of ranks, by the number of each one's host, as Horovod counts them."""
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    by_rank = [
        RankPlace(
            hostname=f"host{host}" if names is None else names[host],
            # Among the hosts that have a rank of this number.
            host=sum(hosts.count(other) > number for other in range(host)),
            local_rank=number,
            cores=[place],
            quotas=[],
        )
        for place, (host, number) in enumerate(zip(hosts, local_ranks, strict=True))
    ]
    return RankPlaces(by_rank, rank)


@pytest.mark.parametrize(
    ("hosts", "path"),
    [
        ([0, 0, 0], "shared memory"),
        ([0, 1, 2], "TCP"),
        ([0, 0, 1, 1], "shared memory and TCP"),
        # As ranks are numbered by node in turn.
        ([0, 1, 0, 1], "shared memory and TCP"),
        ([0, 0, 1], "shared memory and TCP"),
        ([0, 1, 1, 2, 1], "shared memory and TCP"),
    ],
)
def test_places_of_ranks(hosts, path):
    for rank, host in enumerate(hosts):
        places = places_of(hosts, rank)
        assert (places.path, places.obstacle, places.host) == (path, "", host)
        assert places.local_ranks == [r for r, each in enumerate(hosts) if each == host]
        counts = [hosts.count(each) for each in sorted(set(hosts))]
        assert (places.smallest_host, places.largest_host) == (min(counts), max(counts))
    first = places_of(hosts)
    one_of_each = [hosts.index(host) for host in sorted(set(hosts))]
    assert first.peers == (one_of_each if len(one_of_each) > 1 else [])
    assert places_of([0, 1, 1], rank=2).peers == []


def test_ranks_of_a_host_need_not_have_one_number_among_the_hosts():
    # Host a has the ranks 0 and 3: MPI counts the second ranks of hosts by rank.
    by_rank = [
        RankPlace("a", 0, 0, [0], []),
        RankPlace("b", 1, 0, [0], []),
        RankPlace("b", 0, 1, [1], []),
        RankPlace("a", 1, 1, [1], []),
    ]
    assert RankPlaces(by_rank, rank=0).hosts == [[0, 3], [1, 2]]
    assert RankPlaces(by_rank, rank=2).peers == [3, 2]


def test_a_wrong_network_is_an_error_that_falls_back(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "10.0.0.0/33")
    with pytest.raises(OSError, match="33"):
        links.PeerListener()


def test_hosts_of_one_name_are_told_apart_by_their_numbers_of_ranks():
    names = ["node"] * 2
    assert places_of([0, 0, 1, 1], names=names).local_ranks == [0, 1]
    obstacle = places_of([0, 0, 1], names=names).obstacle
    assert obstacle == "several hosts of different numbers of ranks are named node"


def three_places(rank):
    # On one core: they sleep while they wait.
    return RankPlaces(
        [RankPlace("host0", 0, number, [0], []) for number in range(3)], rank
    )


def fork_rank(rank, file, until):
    """A process that has mapped the memory of three ranks, and ends with `until`."""
    ready, is_ready = os.pipe()
    child = os.fork()
    if child == 0:
        functions = native.load().functions
        failed = segment.attach(functions, file, three_places(rank))
        os.write(is_ready, b"1")
        os.read(until, 1)
        os._exit(1 if failed else 0)
    assert os.read(ready, 1)
    return child


def test_rank_that_has_ended_is_noticed_while_another_one_computes(monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "10")
    functions = native.load().functions
    functions.hvdtrain_join.restype = ctypes.c_char_p
    never, _never = os.pipe()
    until, end = os.pipe()
    with segment.reserve(functions, three_places(0)) as file:
        computing = fork_rank(1, file.name, never)
        ending = fork_rank(2, file.name, until)
        assert not segment.attach(functions, file.name, three_places(0))
    try:
        functions.hvdtrain_start()
        os.write(end, b"1")
        assert os.waitstatus_to_exitcode(os.waitpid(ending, 0)[1]) == 0
        assert functions.hvdtrain_join(ctypes.byref(ctypes.c_int())) == (
            b"rank 2 has ended"
        )
    finally:
        functions.hvdtrain_leave()
        os.kill(computing, signal.SIGKILL)
        os.waitpid(computing, 0)


@pytest.mark.parametrize("size", [2, 31, 32, 100, 1000])
def test_memory_of_many_ranks_is_bounded(size):
    count = segment._slot_bytes(size)
    assert count % 128 == 0
    assert 0 < count <= 1 << 20
    assert count * (size + 1) <= 32 << 20


@pytest.mark.parametrize(
    ("environ", "limits"),
    [
        ({}, (60.0, 0.0)),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}, (5.0, 0.0)),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7"}, (60.0, 7.0)),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, (0.0, 0.0)),
    ],
)
def test_stall_limits_are_horovods(monkeypatch, environ, limits):
    for name in ("CHECK_TIME_SECONDS", "SHUTDOWN_TIME_SECONDS", "CHECK_DISABLE"):
        monkeypatch.delenv(f"HOROVOD_STALL_{name}", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert environment.stall_limits() == limits
