"""What images, job scripts and manifests say twice, they say alike."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from hvdtrain.install import missing_tools, wheels

ROOT = pathlib.Path(__file__).parents[2]
DOCKERFILES = ["docker/Dockerfile", "docker/Dockerfile.gpu"]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in (
        "docker/**/*.sh",
        "examples/*.sbatch",
        "scripts/**/*.sbatch",
        "scripts/**/*.sh",
    )
    for path in ROOT.glob(pattern)
)


def text(name):
    return (ROOT / name).read_text()


def one(pattern, name):
    [found] = set(re.findall(pattern, text(name), re.MULTILINE))
    return found


def test_scripts_are_of_their_shell():
    assert len(SCRIPTS) > 10
    for script in SCRIPTS:
        is_bash = "bash" in text(script).splitlines()[0] or script.endswith("/job.sh")
        shell = "bash" if is_bash else "sh"
        subprocess.run([shell, "-n", ROOT / script], check=True, timeout=30)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "usage: scripts/release.sh DIR"),
        (["--fast", "new"], "unknown argument --fast"),
        (["a", "b"], "expected one directory"),
        (["full"], "full exists and is not an empty directory"),
        (["full/file"], "full/file exists and is not an empty directory"),
    ],
)
def test_a_release_refuses_wrong_arguments_in_one_line(tmp_path, arguments, error):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    command = [ROOT / "scripts/release.sh", *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("release: ")
    assert error in done.stderr


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_what_the_image_leaves_out_is_in_the_set_up(dockerfile):
    names = one(r"grep -vE '\^\(([^)]*)\)==", dockerfile).split("|")
    for name in names:
        assert re.search(rf"^{name}==", text("scripts/requirements.txt"), re.MULTILINE)


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_the_image_leaves_out_the_packages_of_the_site(dockerfile):
    first, last = re.search(r"sed '/\^(.*?)/,/\^(.*?)/d'", text(dockerfile)).groups()
    _, block = text("scripts/requirements.txt").split(f"\n{first}")
    block, rest = block.split(f"\n{last}")
    assert "\nmkdocs==" in block
    assert "\nmarkdown==" in rest


def test_cpus_and_gpus_get_the_same_tensorflow():
    version = r"^tensorflow==([\d.]+)"
    names = ("scripts/requirements.txt", "scripts/requirements_gpu.txt")
    assert len({one(version, name) for name in names}) == 1
    cpu = one(r"^tensorflow-cpu==([\d.]+)", "scripts/requirements.txt")
    assert cpu == one(version, "scripts/requirements.txt")


def test_each_patch_has_its_reason_and_origin():
    patches = wheels.patches()
    assert len(patches) > 30
    numbers = [int(patch.name[:2]) for patch in patches]
    assert numbers == list(range(1, len(patches) + 1))
    for patch in patches:
        head, _, change = patch.read_text().partition("\n--- a/")
        assert re.fullmatch(r"[A-Z][^\n]{20,78}\.\n\n.{40,}\n\nOrigin: .+", head, re.S)
        assert re.search(r"^[+-][^+-]", change, re.M)


def test_what_a_dockerfile_copies_is_not_ignored():
    allowed = [
        line[1:] for line in text(".dockerignore").splitlines() if line.startswith("!")
    ]
    for dockerfile in DOCKERFILES:
        lines = text(dockerfile).replace("\\\n", " ").splitlines()
        for line in lines:
            if line.startswith("COPY ") and "--from" not in line:
                for source in line.split()[1:-1]:
                    assert (ROOT / source).exists(), source
                    path = pathlib.PurePath(source)
                    inside = (path, *path.parents[:-1])
                    assert any(part.match(p) for part in inside for p in allowed)


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_the_installer_needs_no_other_module_than_the_images_copy(dockerfile, tmp_path):
    lines = re.sub(r"\\\n\s*", "", text(dockerfile))
    for sources, target in re.findall(
        r"^COPY (hvdtrain/.*) /build/(\S+)$", lines, re.MULTILINE
    ):
        for source in sources.split():
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target)
            else:
                (tmp_path / target).mkdir(exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / target)
    [program] = re.findall(r"-c '(from hvdtrain.*)'", lines)
    imports = program[: program.index("; install(")]
    assert (tmp_path / "hvdtrain" / "__init__.py").exists()
    subprocess.run(
        [sys.executable, "-c", imports], cwd=tmp_path, check=True, timeout=60
    )


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_what_a_dockerfile_mounts_is_committed(dockerfile):
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a clone")
    for source in set(re.findall(r"type=bind,source=([^,]+)", text(dockerfile))):
        for path in (ROOT / source).iterdir():
            command = ["git", "check-ignore", "-q", path]
            ignored = subprocess.run(command, cwd=ROOT, timeout=30, check=False)
            assert ignored.returncode == 1, f"{path} is ignored"


def manifest(name):
    """Return the job or the runtime of a file, its last document."""
    return [*yaml.safe_load_all(text(f"scripts/kubernetes/{name}.yaml"))][-1]


def pods(name):
    """Return the pods of the worker and of the launcher that a manifest starts."""
    spec = manifest(name)["spec"]
    if name == "mpijob":
        replicas = spec["mpiReplicaSpecs"]
        templates = [replicas[role]["template"] for role in ("Worker", "Launcher")]
    else:
        jobs = {job["name"]: job for job in spec["template"]["spec"]["replicatedJobs"]}
        templates = [
            jobs[role]["template"]["spec"]["template"] for role in ("node", "launcher")
        ]
    return [template["spec"] for template in templates]


def words(pod):
    [container] = pod["containers"]
    return container["command"] + container.get("args", [])


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_has_the_tools_of_a_build(name):
    """`scripts/docker_test.sh` does not show it where the image takes wheels."""
    stage = text(name).partition(" AS build\n")[2].partition("\nFROM")[0]
    assert {tool for tool, _ in missing_tools._PACKAGES.values()} <= {*stage.split()}


@pytest.mark.parametrize("name", ["mpijob", "runtime"])
def test_the_pods_of_kubernetes_fit_the_image(name):
    user = int(one(r"useradd .*--uid (\d+)", "docker/Dockerfile"))
    port = int(one(r"^port=(\d+)", "docker/host.sh"))
    for pod in pods(name):
        [container] = pod["containers"]
        assert container["securityContext"]["runAsUser"] == user
        assert container["command"][:3] == ["tini", "-g", "--"]
        assert pod.get("securityContext", {}).get("fsGroup", user) == user
    worker, launcher = pods(name)
    [container] = worker["containers"]
    assert container["readinessProbe"]["tcpSocket"]["port"] == port
    assert f"-p {port} " in words(launcher)[words(launcher).index("plm_rsh_args") + 1]
    path = one(r"^ +sshAuthMountPath: (.*)", f"scripts/kubernetes/{name}.yaml")
    assert path == "/home/hvdtrain/.ssh"


def test_a_trainjob_starts_what_an_mpijob_starts():
    job, runtime = manifest("trainjob"), manifest("runtime")
    assert job["spec"]["runtimeRef"] == {"name": runtime["metadata"]["name"]}
    replicas = manifest("mpijob")["spec"]["mpiReplicaSpecs"]
    assert job["spec"]["trainer"]["numNodes"] == replicas["Worker"]["replicas"]
    old, new = pods("mpijob"), pods("runtime")
    assert words(new[0]) == words(old[0])
    assert words(new[1]) + job["spec"]["trainer"]["args"] == words(old[1])
    for key in ("image", "resources", "securityContext"):
        assert [pod["containers"][0][key] for pod in new] == [
            pod["containers"][0][key] for pod in old
        ]
    [seconds] = {pod["terminationGracePeriodSeconds"] for pod in old + new}
    assert seconds >= 120
    starts = [*replicas.values(), *new]
    assert {start["restartPolicy"] for start in starts} == {"Never"}


def test_the_plugin_of_trainer_finds_its_jobs_and_containers():
    # It takes numNodes of the runtime for the Job with the label: the launcher.
    spec = manifest("runtime")["spec"]
    assert spec["mlPolicy"]["numNodes"] == 1
    jobs = spec["template"]["spec"]
    assert jobs["successPolicy"]["targetReplicatedJobs"] == ["launcher"]
    node, launcher = jobs["replicatedJobs"]
    assert (node["name"], launcher["name"]) == ("node", "launcher")
    assert launcher["dependsOn"] == [{"name": "node", "status": "Ready"}]
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert launcher["template"]["metadata"]["labels"] == label
    assert "metadata" not in node["template"]
    for pod in pods("runtime"):
        assert [container["name"] for container in pod["containers"]] == ["node"]
        # The keys can be read by root and by this group only.
        assert "fsGroup" in pod["securityContext"]


def test_the_hosts_of_compose_share_one_key():
    services = yaml.safe_load(text("docker/compose.yaml"))["services"]
    for name, service in services.items():
        assert service["volumes"] == ["ssh:/home/hvdtrain/.ssh"]
        assert "ports" not in service, f"{name} is reachable from outside"


# Fields of published types, and their types; a set holds the values allowed, a list the
# type of its items. A cluster drops a field that it does not know without an error.

# PodSpec, Container and JobSpec of Kubernetes, core/v1 and batch/v1: fields that a job
# may need.
CONTAINER = {
    "name": str,
    "image": str,
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "command": [str],
    "args": [str],
    "workingDir": str,
    "env": [dict],
    "resources": {"requests": dict, "limits": dict},
    "volumeMounts": [dict],
    "readinessProbe": {"tcpSocket": {"port": int}},
    "securityContext": {
        "runAsUser": int,
        "runAsNonRoot": bool,
        "allowPrivilegeEscalation": bool,
        "capabilities": {"add": [str], "drop": [str]},
    },
}
POD = {
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "terminationGracePeriodSeconds": int,
    "subdomain": str,
    "securityContext": {"fsGroup": int, "runAsUser": int, "runAsGroup": int},
    "containers": [CONTAINER],
    "volumes": [dict],
    "nodeSelector": dict,
    "tolerations": [dict],
    "imagePullSecrets": [dict],
}
POD_TEMPLATE = {"metadata": dict, "spec": POD}
JOB = {
    "parallelism": int,
    "completions": int,
    "activeDeadlineSeconds": int,
    "podFailurePolicy": dict,
    "backoffLimit": int,
    "backoffLimitPerIndex": int,
    "maxFailedIndexes": int,
    "ttlSecondsAfterFinished": int,
    "completionMode": {"NonIndexed", "Indexed"},
    "podReplacementPolicy": {"TerminatingOrFailed", "Failed"},
    "template": POD_TEMPLATE,
}

SERVICE = {
    "clusterIP": {"None"},
    "selector": dict,
    "publishNotReadyAddresses": bool,
}

# MPIJobSpec, RunPolicy and ReplicaSpec of kubeflow/mpi-operator,
# pkg/apis/kubeflow/v2beta1/types.go.
RUN_POLICY = {
    "cleanPodPolicy": {"All", "Running", "None"},
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
    "schedulingPolicy": dict,
    "suspend": bool,
    "managedBy": str,
}
REPLICA = {
    "replicas": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template": POD_TEMPLATE,
}
MPI_JOB = {
    "slotsPerWorker": int,
    "runLauncherAsWorker": bool,
    "runPolicy": RUN_POLICY,
    "mpiReplicaSpecs": {"Launcher": REPLICA, "Worker": REPLICA},
    "sshAuthMountPath": str,
    "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
    "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
}

# JobSetSpec of kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go.
JOB_SET = {
    "replicatedJobs": [
        {
            "name": str,
            "groupName": str,
            "template": {
                "metadata": {"labels": dict, "annotations": dict},
                "spec": JOB,
            },
            "replicas": int,
            "dependsOn": [{"name": str, "status": {"Ready", "Complete"}}],
        }
    ],
    "network": {
        "enableDNSHostnames": bool,
        "subdomain": str,
        "publishNotReadyAddresses": bool,
    },
    "successPolicy": {"operator": {"All", "Any"}, "targetReplicatedJobs": [str]},
    "failurePolicy": {
        "maxRestarts": int,
        "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
        "rules": [dict],
    },
    "startupPolicy": {"startupPolicyOrder": {"AnyOrder", "InOrder"}},
    "suspend": bool,
    "coordinator": dict,
    "managedBy": str,
    "ttlSecondsAfterFinished": int,
    "volumeClaimPolicies": [dict],
}

# TrainingRuntimeSpec and TrainJobSpec of kubeflow/trainer,
# pkg/apis/trainer/v1alpha1/trainingruntime_types.go and trainjob_types.go.
RUNTIME = {
    "mlPolicy": {
        "numNodes": int,
        "torch": dict,
        "flux": dict,
        "mpi": {
            "numProcPerNode": int,
            "mpiImplementation": {"OpenMPI"},
            "sshAuthMountPath": str,
            "runLauncherAsNode": bool,
        },
    },
    "podGroupPolicy": {"coscheduling": dict, "volcano": dict},
    "template": {"metadata": dict, "spec": JOB_SET},
}
TRAIN_JOB = {
    "runtimeRef": {"name": str, "apiGroup": str, "kind": str},
    "initializer": {"dataset": dict, "model": dict},
    "trainer": {
        "image": str,
        "command": [str],
        "args": [str],
        "env": [dict],
        "numNodes": int,
        "resourcesPerNode": {"requests": dict, "limits": dict},
        "numProcPerNode": int,
    },
    "runtimePatches": [dict],
    "suspend": bool,
    "activeDeadlineSeconds": int,
    "managedBy": str,
}
PUBLISHED = {
    "job": ("batch/v1", "Job", JOB),
    "mpijob": ("kubeflow.org/v2beta1", "MPIJob", MPI_JOB),
    "runtime": (
        "trainer.kubeflow.org/v1alpha1",
        "ClusterTrainingRuntime",
        RUNTIME,
    ),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob", TRAIN_JOB),
}


def misfits(value, published, path="spec"):
    """Yields what in `value` the published type does not allow."""
    if isinstance(published, set):
        if value not in published:
            yield f"{path}: {value!r}"
        return
    expected = published if isinstance(published, type) else type(published)
    if type(value) is not expected:
        yield f"{path}: {value!r} is not {expected.__name__}"
    elif isinstance(published, list):
        for number, item in enumerate(value):
            yield from misfits(item, published[0], f"{path}[{number}]")
    elif isinstance(published, dict):
        for name, part in value.items():
            if name not in published:
                yield f"{path}.{name}: unknown"
            else:
                yield from misfits(part, published[name], f"{path}.{name}")


def test_every_manifest_is_compared_with_published_types():
    manifests = (ROOT / "scripts/kubernetes").glob("*.yaml")
    assert {path.stem for path in manifests} == {*PUBLISHED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_cluster_knows_every_field(name):
    version, kind, published = PUBLISHED[name]
    job = manifest(name)
    assert (job["apiVersion"], job["kind"]) == (version, kind)
    assert list(misfits(job["spec"], published)) == []


def test_the_pods_of_an_indexed_job_find_rank_0():
    service, job = yaml.safe_load_all(text("scripts/kubernetes/job.yaml"))
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert list(misfits(service["spec"], SERVICE)) == []
    name, spec = job["metadata"]["name"], job["spec"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] >= 120
    [container] = pod["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert values["HVDTRAIN_ADDRESS"] == f"{name}-0.{pod['subdomain']}"
    assert int(values["HVDTRAIN_SIZE"]) == spec["completions"] == spec["parallelism"]
    user = int(one(r"useradd .*--uid (\d+)", "docker/Dockerfile"))
    assert container["securityContext"]["runAsUser"] == user
    assert container["command"][:3] == ["tini", "-g", "--"]


def test_the_cluster_knows_every_field_of_the_pages():
    blocks = re.findall(r"```yaml\n(.*?)```", text("docs/platforms.md"), re.S)
    jobs = [yaml.safe_load(block) for block in blocks]
    kinds = {
        kind: (version, published) for version, kind, published in PUBLISHED.values()
    }
    assert [job["kind"] for job in jobs] == ["TrainJob"]
    for job in jobs:
        version, published = kinds[job["kind"]]
        assert job["apiVersion"] == version
        assert list(misfits(job["spec"], published)) == []


@pytest.mark.parametrize(
    ("published", "slip"),
    [
        (MPI_JOB, {"slotPerWorker": 1}),
        (MPI_JOB, {"slotsPerWorker": "1"}),
        (MPI_JOB, {"runPolicy": {"suspended": True}}),
        (RUNTIME, {"mlPolicy": {"mpi": {"mpiImplementation": "MPICH"}}}),
        (RUNTIME, {"template": {"spec": {"successPolicy": "All"}}}),
        (JOB_SET, {"replicatedJobs": [{"name": "node", "dependsOn": {"name": "a"}}]}),
        (JOB_SET, {"replicatedJobs": [{"name": "node"}, {"names": "launcher"}]}),
        (JOB, {"template": {"spec": {"terminationGracePeriodSecond": 120}}}),
        (JOB, {"completionMode": "indexed"}),
        (TRAIN_JOB, {"trainer": {"args": "python"}}),
        (TRAIN_JOB, {"trainer": {"numNode": 2}}),
    ],
)
def test_a_slip_in_a_field_is_found(published, slip):
    assert len(list(misfits(slip, published))) == 1


# How the scripts write the words of the README's commands.
SPELLED = {'"$docker"': "docker", '"$name"': "hvdtrain", "--tag": "-t", "--file": "-f"}


def lines(script):
    """Return the lines of a script, in words; lines that continue are joined."""
    joined = text(script).replace("\\\n", " ").splitlines()
    return [[SPELLED.get(word, word) for word in line.split()] for line in joined]


def is_run(command):
    """Return whether a test script runs this command of the README."""
    program, *words = command.split()
    if program == "sbatch":
        submitted = [
            line for line in lines("scripts/slurm_test.sh") if "submit" in line
        ]
        return any({*words} <= {*line} for line in submitted)
    docker = lines("scripts/docker_test.sh")
    if words[0] == "build":
        return any({program, *words} <= {*line} for line in docker)
    # `run ARGUMENTS` is a function of the script: docker run ... hvdtrain ARGUMENTS.
    image = words.index("hvdtrain")
    [function] = [line for line in docker if line[-2:] == ["hvdtrain", '"$@"']]
    calls = [
        f" {' '.join(line)} ".rpartition(" run ")[2].split()
        for line in docker
        if "run" in line and "docker" not in line
    ]
    calls = [call[: call.index("|")] if "|" in call else call for call in calls]
    return {program, *words[:image]} <= {*function} and words[image + 1 :] in calls


def test_scripts_run_the_docker_and_sbatch_commands_of_the_readme():
    commands = re.findall(
        r"^((?:docker|sbatch) .*?) *(?:#.*)?$", text("README.md"), re.M
    )
    assert len(commands) == 4
    assert [command for command in commands if not is_run(command)] == []


@pytest.mark.parametrize(
    "command",
    [
        "docker build -t hvdtrain -f docker/Dockerfile.gpu .",
        "docker run --rm hvdtrain verify",
        "docker run --rm --gpus=all hvdtrain",
        "sbatch scripts/slurm/mnist_container.sbatch",
        "sbatch --exclusive scripts/slurm/mnist.sbatch",
    ],
)
def test_a_command_that_no_script_runs_is_found(command):
    assert not is_run(command)
