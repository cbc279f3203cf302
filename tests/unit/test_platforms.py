"""Jobs by the variables of a platform: who is which rank, and how the ranks meet."""

import concurrent.futures
import contextlib
import json
import re
import socket
import threading

import pytest
from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.job import JobError, formation, platforms, registry
from hvdtrain.job.registry import Registration, assign
from hvdtrain.runner import caller

CLUSTER = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "evaluator": ["d:4"]}
POOLS = {"workerpool0": ["a:1"], "workerpool1": ["b:2", "c:3"], "workerpool3": ["d:4"]}
TORCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
TRAINER = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"}
TRAINER |= {"PET_MASTER_PORT": "7", "PET_NPROC_PER_NODE": "1"}
OWN = {"HVDTRAIN_SIZE": "3", "HVDTRAIN_ADDRESS": "a"}
SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7"}
SLURM |= {"SLURM_STEP_NODELIST": "n[01-02]", "SLURM_STEP_ID": "0"}
HOSTS = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}


def cluster(variable, kind, index=0, tasks=None):
    tasks = tasks or (CLUSTER if variable == "TF_CONFIG" else POOLS)
    task = {"type": kind, "index": index}
    return {variable: json.dumps({"cluster": tasks, "task": task})}


# Each as the platform's documentation has it; see the readers for the sources.
@pytest.mark.parametrize(
    ("environ", "place", "host", "port"),
    [
        (cluster("TF_CONFIG", "chief"), (0, 3), "a", 1),
        (cluster("TF_CONFIG", "worker", 1), (2, 3), "a", 1),
        # MultiWorkerMirroredStrategy without a chief: worker 0 is it.
        (
            cluster(
                "TF_CONFIG", "worker", 1, {"worker": ["b:2", "c:3"], "ps": ["p:1"]}
            ),
            (1, 2),
            "b",
            2,
        ),
        (cluster("CLUSTER_SPEC", "workerpool0"), (0, 3), "a", 1),
        (cluster("CLUSTER_SPEC", "workerpool1", 0), (1, 3), "a", 1),
        (TORCH, (1, 2), "a", 7),
        # The agent of torchrun has the port.
        (TORCH | AGENT, (1, 2), "a", 8),
        (TRAINER, (1, 2), "a", 7),
        # torchrun, which the runtime's default command starts.
        (TRAINER | TORCH | {"RANK": "0"}, (0, 2), "a", 7),
        (SLURM, (1, 2), "n01", 20112),
        (SLURM | {"SLURM_STEP_NODELIST": "a-1,n[3,5]"}, (1, 2), "a-1", 20112),
        (SLURM | {"SLURM_STEP_NODELIST": "r[1,3]-x"}, (1, 2), "r1-x", 20112),
        # The tasks have another order than the nodes.
        (SLURM | {"HVDTRAIN_ADDRESS": "n02"}, (1, 2), "n02", 20112),
        # srun starts torchrun.
        (SLURM | TORCH, (1, 2), "a", 7),
        (HOSTS, (1, 2), "algo-1", platforms.DEFAULT_PORT),
        (OWN | {"HVDTRAIN_RANK": "2"}, (2, 3), "a", platforms.DEFAULT_PORT),
        (
            OWN | {"HVDTRAIN_ADDRESS": "a:9", "JOB_COMPLETION_INDEX": "0"},
            (0, 3),
            "a",
            9,
        ),
        # The innermost: hvdtrain.launch starts ranks under any of the others.
        (TORCH | OWN | {"HVDTRAIN_RANK": "2"}, (2, 3), "a", platforms.DEFAULT_PORT),
    ],
)
def test_a_platform_describes_a_rank(environ, place, host, port):
    task = platforms.read(environ)
    assert ((task.rank, task.size), task.host, task.ports[0]) == (
        place,
        host,
        port,
    )


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        cluster("TF_CONFIG", "worker", 0, {"worker": ["a:1"]}),
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        # Says nothing of a number.
        {"JOB_COMPLETION_INDEX": "1"},
        {"RANK": "1"},
        {"WORLD_SIZE": "huge"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"HVDTRAIN_SIZE": "1"},
        # A batch script of a job of four tasks.
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
        {"PET_NNODES": "1", "PET_NODE_RANK": "0"},
        # Of another program.
        {"CLUSTER_SPEC": "three nodes"},
    ],
)
def test_a_process_that_no_platform_counts_is_alone(environ):
    assert platforms.read(environ) is None


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        (
            {"TF_CONFIG": "{cluster: }"},
            "TF_CONFIG='{cluster: }', which does not describ",
        ),
        (cluster("TF_CONFIG", "worker", 2), "no task 2 of type worker"),
        (cluster("TF_CONFIG", "ps"), "'ps' in TF_CONFIG; expected chief or master or"),
        ({"TF_CONFIG": json.dumps({"cluster": CLUSTER})}, "task type '' in TF_CONFIG"),
        (
            TORCH | {"RANK": "2"},
            "rank 2 of 2 by WORLD_SIZE; expected a rank from 0 to 1",
        ),
        (TORCH | {"MASTER_ADDR": ""}, "RANK and WORLD_SIZE without MASTER_ADDR"),
        (TORCH | {"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE without RANK: the ranks cannot find"),
        ({"PET_NNODES": "2"}, "PET_NNODES without PET_NODE_RANK"),
        (TRAINER | {"PET_NNODES": "1:4"}, "PET_NNODES='1:4'"),
        (
            TORCH | {"MASTER_PORT": "70000"},
            "a:70000 of rank 0 by WORLD_SIZE; expected",
        ),
        (OWN | {"HVDTRAIN_ADDRESS": "[fd00::1]:9", "HVDTRAIN_RANK": "0"}, "IPv4 addre"),
        (HOSTS | {"SM_CURRENT_HOST": "algo-3"}, "SM_HOSTS without SM_CURRENT_HOST"),
        (
            SLURM | {"SLURM_PROCID": "0", "SLURMD_NODENAME": "n02"},
            "task 0 on node n02; expected it on n01, .* Set HVDTRAIN_ADDRESS=n02 for",
        ),
        (OWN, r"HVDTRAIN_SIZE without HVDTRAIN_RANK \(or JOB_COMPLETION_INDEX\)"),
        ({"HVDTRAIN_SIZE": "2", "HVDTRAIN_RANK": "0"}, "without HVDTRAIN_ADDRESS"),
    ],
)
def test_a_wrong_description_is_one_line(environ, error):
    with pytest.raises(JobError, match=error) as info:
        platforms.read(environ)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "environ",
    [cluster("TF_CONFIG", "evaluator"), cluster("CLUSTER_SPEC", "workerpool3")],
)
def test_an_evaluator_leaves_without_a_failure(environ, capfd):
    with pytest.raises(SystemExit) as info:
        platforms.form_job(environ)
    assert not info.value.code
    assert "all ranks evaluate together" in capfd.readouterr().err


def test_a_container_of_sagemaker_without_its_toolkit(tmp_path, monkeypatch):
    path = tmp_path / "resourceconfig.json"
    hosts = {"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}
    path.write_text(json.dumps(hosts | {"network_interface_name": "eth0"}))
    monkeypatch.setattr(platforms, "_RESOURCES", path)
    task = platforms.read({"TRAINING_JOB_NAME": "job"})
    assert (task.rank, task.size, task.host) == (1, 2, "algo-1")


@pytest.fixture
def servers(monkeypatch):
    """Return the servers of ranks 0, which end with the test."""
    made = []

    class Registry(formation.Registry):
        def __init__(self, address, member):
            super().__init__(address, member)
            made.append(self)

    monkeypatch.setattr(formation, "Registry", Registry)
    yield made
    for server in made:
        server.close()


@pytest.fixture
def own():
    """Return the variables of a rank of two at a free port of this host."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    return {"HVDTRAIN_SIZE": "2", "HVDTRAIN_ADDRESS": address}


def start(pool, environ, rank, **more):
    """Return a process as a thread, and its variables."""
    variables = environ | {"HVDTRAIN_RANK": str(rank)} | more
    return pool.submit(platforms.form_job, variables), variables


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


def wait_until_registered(servers, rank):
    # The server of rank 0 exists once it has been reached.
    deadline = threading.Event()
    for _ in range(1000):
        with contextlib.suppress(IndexError):
            # It registers first, and then asks.
            if rank in servers[-1]._asked_seconds:
                return
        deadline.wait(0.01)
    raise AssertionError


def test_ranks_receive_the_variables_of_horovodrun(servers, own, pool):
    ranks = [start(pool, own, rank) for rank in (1, 0)]
    for done, _ in ranks:
        done.result(timeout=20)
    port = servers[0]._store.server_port
    for rank, (_, variables) in zip((1, 0), ranks, strict=True):
        host = variables.pop("HOROVOD_HOSTNAME")
        assert host.startswith(socket.gethostname().split(".")[0])
        assert variables == own | {
            "HVDTRAIN_RANK": str(rank),
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": str(rank),
            "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "NCCL_SOCKET_IFNAME": "lo",
        }
        # A second `hvd.init` of the process changes nothing.
        platforms.form_job(variables)


@pytest.fixture
def unknown(monkeypatch):
    """Return the name of this host, which has no address."""

    def look_up(host, *args, **kwargs):
        if host.endswith(".invalid"):
            raise socket.gaierror(-2, "Name or service not known")
        return found(host, *args, **kwargs)

    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "getfqdn", lambda name: name)
    monkeypatch.setattr(socket, "gethostname", lambda: "pod4.invalid")
    return "pod4.invalid"


def test_ranks_of_a_host_whose_name_has_no_address_use_its_loopback(
    servers, own, pool, unknown
):
    own["HVDTRAIN_ADDRESS"] = own["HVDTRAIN_ADDRESS"].replace("127.0.0.1", unknown)
    for done, variables in [start(pool, own, rank) for rank in (1, 0)]:
        done.result(timeout=20)
        assert variables["HOROVOD_GLOO_IFACE"] == "lo"


def test_the_error_says_to_what_the_name_of_rank_0_resolves(
    own, pool, unknown, monkeypatch
):
    monkeypatch.setenv("HVDTRAIN_INIT_TIMEOUT_SECONDS", "0.1")
    own["HVDTRAIN_ADDRESS"] = "pod5.invalid:4444"
    done, _ = start(pool, own, 1)
    error = (
        r"; on pod4.invalid, pod5.invalid has no address \(Name or service not known\)"
    )
    with pytest.raises(JobError, match=error):
        done.result(timeout=20)


def test_a_rank_that_is_late_is_named_within_the_limit(
    servers, own, pool, monkeypatch, capfd
):
    monkeypatch.setenv("HVDTRAIN_INIT_TIMEOUT_SECONDS", "0.4")
    monkeypatch.setenv("HVDTRAIN_INIT_REPORT_SECONDS", "0.1")
    waiting, _ = start(pool, own, 0)
    with pytest.raises(
        JobError, match=r"rank 1 has not called hvd.init\. Set HVDTRAIN_ALONE=1 if"
    ):
        waiting.result(timeout=20)
    assert "rank 0 has waited for 0.1 s" in capfd.readouterr().err
    servers.pop().close()
    alone, _ = start(pool, own, 1)
    with pytest.raises(
        JobError, match=r"rank 0 does not answer at 127.0.0.1:\d+: .*ref"
    ):
        alone.result(timeout=20)


HERE = {"SLURM_STEP_NODELIST": "localhost"}
SHELL = {"SLURM_PTY_PORT": "4", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environ", "declared", "doubt"),
    [
        (SLURM | HERE | SHELL, "SLURM_STEP_NUM_TASKS of 2", "srun --overlap"),
        (SHELL | {"HVDTRAIN_DECLARED": "4 x 2"}, "4 x 2, which", "srun --overlap"),
        (SLURM | HERE | {"SLURM_DISTRIBUTION": "arbitrary"}, "", "HVDTRAIN_ADDRESS to"),
        (SLURM | HERE | {"SLURM_HET_SIZE": "2"}, "", "HVDTRAIN_ADDRESS to"),
    ],
)
def test_ranks_that_were_not_started_are_doubted_early(
    servers, own, pool, monkeypatch, capfd, environ, declared, doubt
):
    monkeypatch.setenv("HVDTRAIN_INIT_TIMEOUT_SECONDS", "0.4")
    # Before the line of any job, after 60 s.
    monkeypatch.setattr(formation, "_DOUBT_SECONDS", 0.1)
    waiting, _ = start(pool, environ if "SLURM_JOB_ID" in environ else own | environ, 0)
    remedy = f"{doubt}.* Set HVDTRAIN_ALONE=1 if this process is to train alone"
    with pytest.raises(JobError, match=f"Received {declared}.*{remedy}"):
        waiting.result(timeout=20)
    assert re.search(f"has waited for 0.1 s.*{remedy}", capfd.readouterr().err)


def test_launch_names_the_platform_that_has_declared_its_ranks():
    slots = [SlotInfo(f"h{i}", i, i, 0, 2, 2, 1) for i in range(2)]
    task = platforms.read(SLURM)
    [*_, last] = caller._environments_of_task(slots, task).values()
    rank = platforms.read(last)
    assert (rank.rank, rank.size, rank.address) == (3, 4, task.address)
    assert rank.declaration == "SLURM_STEP_NUM_TASKS of 2 processes with 2 ranks each"


def test_ranks_with_other_numbers_of_ranks_do_not_train(servers, own, pool):
    ranks = [start(pool, own, 0), start(pool, own, 1, HVDTRAIN_SIZE="3")]
    for done, _ in ranks:
        with pytest.raises(
            JobError, match=r"rank 1 on .* expects 3 ranks, and rank 0 2"
        ):
            done.result(timeout=20)


def test_rank_0_serves_until_the_others_have_the_error(servers, own, pool):
    chief, _ = start(pool, own, 0)
    wait_until_registered(servers, 0)
    token = servers[0]._present[0].token
    servers[0].register(Registration("other", 1, 3, "", "host"), "127.0.0.1")
    assert not servers[0].state(0, token).error
    assert "expects 3 ranks" in servers[0].state(1, "other").error
    with pytest.raises(JobError, match="rank 1 on host expects 3 ranks"):
        chief.result(timeout=20)


def test_a_restarted_rank_replaces_the_one_before(servers, own, pool):
    own = own | {"HVDTRAIN_SIZE": "3"}
    chief, _ = start(pool, own, 0)
    first, _ = start(pool, own, 1)
    wait_until_registered(servers, 1)
    second, variables = start(pool, own, 1)
    with pytest.raises(JobError, match="it was started again on"):
        first.result(timeout=20)
    last, _ = start(pool, own, 2)
    for each in (chief, second, last):
        each.result(timeout=20)
    assert variables["HOROVOD_RANK"] == "1"


def test_a_rank_that_has_ended_does_not_complete_a_job(servers, own, pool):
    own = own | {"HVDTRAIN_SIZE": "3"}
    chief, _ = start(pool, own, 0)
    wait_until_registered(servers, 0)
    ended = Registration("token", 1, 3, "", "")
    servers[0].register(ended, "127.0.0.1")
    assert servers[0].state(1, "token").missing == (2,)
    # As if it had asked long ago.
    servers[0]._asked_seconds[1] -= 2 * registry._LOST_SECONDS
    last, _ = start(pool, own, 2)
    wait_until_registered(servers, 2)
    # Rank 1 does not ask again, until it is started again.
    with pytest.raises(concurrent.futures.TimeoutError):
        chief.result(timeout=1.5)
    for each in (start(pool, own, 1)[0], chief, last):
        each.result(timeout=20)


def test_a_rank_that_is_restarted_later_joins_the_next_job(servers, own, pool):
    for each in [start(pool, own, rank) for rank in (0, 1)]:
        each[0].result(timeout=20)
    restarted, variables = start(pool, own, 1)
    with pytest.raises(concurrent.futures.TimeoutError):
        restarted.result(timeout=0.3)
    # Rank 0 has lost rank 1, and is restarted as well.
    servers.pop().close()
    chief, _ = start(pool, own, 0)
    chief.result(timeout=20)
    restarted.result(timeout=20)
    assert variables["HOROVOD_RANK"] == "1"


def test_a_second_rank_1_does_not_disturb_a_job(servers, own, pool, monkeypatch):
    for each in [start(pool, own, rank) for rank in (0, 1)]:
        each[0].result(timeout=20)
    monkeypatch.setenv("HVDTRAIN_INIT_TIMEOUT_SECONDS", "0.2")
    second, _ = start(pool, own, 1)
    with pytest.raises(
        JobError, match=r"rank 1 is in the job .* already.*started twice"
    ):
        second.result(timeout=20)


def test_a_port_that_is_in_use_is_an_error_of_rank_0(servers, own, pool):
    host, _, port = own["HVDTRAIN_ADDRESS"].partition(":")
    with socket.create_server((host, int(port))):
        chief, _ = start(pool, own, 0)
        with pytest.raises(JobError, match=rf"cannot listen at port {port}.*in use"):
            chief.result(timeout=20)


@pytest.mark.long
def test_under_torchrun_rank_0_takes_a_port_that_is_free(servers, pool):
    # The agent has the first, another program the second.
    with socket.create_server(("127.0.0.1", 0)) as agent:
        port = agent.getsockname()[1]
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port + 1)))
            environ = TORCH | AGENT | {"MASTER_ADDR": "localhost"}
            environ |= {"MASTER_PORT": str(port)}
            ranks = [start(pool, environ, 9, RANK=str(rank)) for rank in (1, 0)]
            for done, variables in ranks:
                done.result(timeout=20)
                assert variables["HOROVOD_SIZE"] == "2"
            assert servers[0].server_port > port + 1


@pytest.mark.parametrize("secret", ["", "another"])
def test_a_process_without_the_secret_is_refused(
    servers, own, pool, monkeypatch, secret
):
    monkeypatch.setenv("HVDTRAIN_INIT_TIMEOUT_SECONDS", "2")
    monkeypatch.setenv("HOROVOD_JOB_SECRET", "one")
    # Its client would have the other secret, too, in this process.
    formation._serve(platforms.read(own | {"HVDTRAIN_RANK": "0"}))
    monkeypatch.setenv("HOROVOD_JOB_SECRET", secret)
    stranger, _ = start(pool, own, 1)
    with pytest.raises(
        JobError, match="refuses a process without its HOROVOD_JOB_SECR"
    ):
        stranger.result(timeout=20)
    assert 1 not in servers[0]._present


def registration(**fields):
    fields = {"token": "x", "rank": 1, "size": 2, "host_hash": "", "host": ""} | fields
    body = json.dumps(fields)
    head = f"PUT /%s/1-x HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"{head}{body}".encode()


@pytest.mark.parametrize(
    "request_text",
    [
        b'PUT /%s/1-x HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"a": 1}\n',
        b"PUT /%s/1-x HTTP/1.1\r\nContent-Length: 3\r\n\r\n\xff\xfe\n",
        registration(rank="1"),
        registration(rank=5),
        b"GET /%s/one HTTP/1.1\r\n\r\n",
        b"GET /../etc/passwd HTTP/1.1\r\n\r\n",
    ],
)
def test_what_a_stranger_sends_changes_nothing(servers, own, pool, request_text):
    chief, _ = start(pool, own, 0)
    wait_until_registered(servers, 0)
    text = request_text.replace(b"%s", servers[0].task.key.encode())
    host, _, port = own["HVDTRAIN_ADDRESS"].partition(":")
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.sendall(text)
        connection.recv(1 << 16)
    other, _ = start(pool, own, 1)
    for each in (chief, other):
        each.result(timeout=20)


def test_hosts_keep_the_platforms_order_of_ranks():
    present = {
        rank: Registration("t", rank, 4, host, host)
        for rank, host in enumerate(["a", "b", "a", "a"])
    }
    slots = assign(present)
    assert [
        (slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size)
        for slot in map(slots.get, range(4))
    ] == [(0, 3, 0, 2), (0, 1, 1, 2), (1, 3, 0, 1), (2, 3, 0, 1)]
