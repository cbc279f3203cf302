#!/usr/bin/env bash
# Starts a throw-away Slurm of two nodes and submits the real job scripts to it.
#
#     scripts/slurm_test.sh [--install]
#
# The nodes n1 and n2 are network namespaces with an address and a slurmd each, inside
# namespaces that end with this script: nothing of it is seen from outside. Needs root
# and the packages below; --install lets it install them with apt-get.
set -euo pipefail

packages=(iproute2 libpmix2 munge slurm-wlm)
root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
network=10.99.0

skip() {
  echo "slurm test: skipped: $*"
  exit 0
}

die() {
  echo "slurm test: $*" >&2
  exit 1
}

check_machine() {
  ((EUID == 0)) || skip "it needs root, to make network namespaces"
  unshare --net --mount --pid --fork --uts true 2>/dev/null ||
    skip "no namespaces may be made here"
  if ! command -v slurmctld munged ip >/dev/null && [[ $1 == --install ]]; then
    echo "slurm test: apt-get install ${packages[*]}"
    apt-get update -qq >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends \
      "${packages[@]}" >/dev/null
  fi
  command -v slurmctld munged ip >/dev/null ||
    skip "no Slurm here: apt-get install ${packages[*]}, or call it with --install"
}

configure() {
  mkdir -p "$work"/{state,log,munge} /etc/slurm /run/{munge,netns}
  # In this mount namespace alone.
  mount -t tmpfs tmpfs /run
  mount -t tmpfs tmpfs /etc/slurm
  mkdir -p /run/{munge,netns}
  { echo "127.0.0.1 localhost" && echo "$network.254 head" && echo "$network.1 n1" &&
    echo "$network.2 n2"; } >"$work/hosts"
  mount --bind "$work/hosts" /etc/hosts
  link_pmix
  cat >/etc/slurm/slurm.conf <<-CONF
	ClusterName=test
	SlurmctldHost=head($network.254)
	SlurmUser=root
	StateSaveLocation=$work/state
	SlurmdSpoolDir=$work/%n
	SlurmctldPidFile=$work/slurmctld.pid
	SlurmdPidFile=$work/%n.pid
	SlurmctldLogFile=$work/log/slurmctld
	SlurmdLogFile=$work/log/%n
	SlurmdParameters=config_overrides
	ProctrackType=proctrack/linuxproc
	TaskPlugin=task/$task_plugin
	SelectType=select/cons_tres
	SelectTypeParameters=CR_CPU
	ReturnToService=2
	KillWait=5
	MinJobAge=600
	NodeName=n[1-2] NodeAddr=$network.[1-2] CPUs=2
	PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE
	CONF
}

# Slurm opens the library by the name that only PMIx's development package has.
link_pmix() {
  local library
  for library in /usr/lib/*/pmix2/lib; do
    cp -r "$library" "$work/pmix"
    ln -sf libpmix.so.2 "$work/pmix/libpmix.so"
    mount --bind "$work/pmix" "$library"
  done
}

start_node() {
  local node=$1 address=$2
  ip netns add "$node"
  ip link add "to-$node" type veth peer name eth0 netns "$node"
  ip link set "to-$node" master hosts up
  ip -n "$node" address add "$address/24" dev eth0
  ip -n "$node" link set eth0 up
  ip -n "$node" link set lo up
  mkdir "$work/$node" "$work/$node.pmix" "$work/$node.etc"
  # PMIx's directories carry the number of the job alone, and the nodes share a /tmp.
  cp /etc/slurm/slurm.conf "$work/$node.etc"
  echo "PMIxCliTmpDirBase=$work/$node.pmix" >"$work/$node.etc/mpi.conf"
  nsenter "--net=/run/netns/$node" unshare --uts --mount sh -c "
    hostname $node && mount --bind $work/$node.etc /etc/slurm && exec slurmd -D -N $node" \
    >"$work/log/$node.out" 2>&1 &
}

start_cluster() {
  hostname head
  ip link set lo up
  ip link add hosts type bridge
  ip address add "$network.254/24" dev hosts
  ip link set hosts up
  head -c 1024 /dev/urandom >"$work/munge/key"
  chmod 600 "$work/munge/key"
  munged --force --key-file="$work/munge/key" --pid-file="$work/munge/pid" \
    --log-file="$work/log/munge" --seed-file="$work/munge/seed" 2>/dev/null
  touch /etc/slurm/mpi.conf
  slurmctld -D >"$work/log/slurmctld.out" 2>&1 &
  start_node n1 "$network.1"
  start_node n2 "$network.2"
  for _ in {1..60}; do
    [[ $(sinfo -h -t idle -o %D 2>/dev/null) == 2 ]] && return
    sleep 1
  done
  tail -n 5 "$work"/log/* >&2
  die "Slurm's nodes did not come up within a minute"
}

# A directory like the clone, so that logs and results stay out of it.
make_clone() {
  mkdir "$work/clone"
  ln -s "$root"/{hvdtrain,scripts,.venv} "$work/clone"
  cd "$work/clone"
}

# submit NAME [OPTIONS of sbatch] SCRIPT [FLAGS]: waits for the end; the log is NAME.log,
# the exit code the job's.
submit() {
  local name=$1
  shift
  timeout 600 sbatch --quiet --wait --job-name="$name" --output="$name.log" "$@"
}

passed=0
failed=0

# check TEXT COMMAND...: one line; what failed also shows the end of all logs.
check() {
  local text=$1
  shift
  if "$@"; then
    echo "slurm test: passed: $text"
    passed=$((passed + 1))
  else
    echo "slurm test: FAILED: $text: $*"
    failed=$((failed + 1))
    tail -v -n 15 ./*.log 2>/dev/null || true
    echo
  fi
}

exits_with() {
  local expected=$1 status=0
  shift
  "$@" || status=$?
  ((status == expected)) || ! echo "exit code $status, expected $expected"
}

# summary NAME KEY...: what the job NAME wrote of itself.
summary() {
  .venv/bin/python -c '
import json, pathlib, sys
[path] = pathlib.Path("runs").glob(sys.argv[1] + "-[0-9]*/summary.json")
summary = json.loads(path.read_text())
print(*(json.dumps(summary[key]) for key in sys.argv[2:]))' "$@"
}

# says NAME TEXT KEY...: those parts of the summary are TEXT.
says() {
  local found=""
  found=$(summary "$1" "${@:3}") && [[ $found == "$2" ]] || ! echo "found $found"
}

same_model() {
  local first="" second=""
  first=$(summary "$1" size steps test_loss) && second=$(summary "$2" size steps test_loss)
  [[ -n $first && $first == "$second" ]] || ! echo "$1: $first, $2: $second"
}

wait_for() {
  for _ in {1..300}; do
    grep -qs "$1" "$2" && return
    sleep 1
  done
  return 1
}

trains() {
  check "mpirun trains on one node" exits_with 0 submit one \
    scripts/slurm/mnist.sbatch "${quick[@]}"
  check "its ranks are on one node" says one '{"n1": 2} [1, 1]' hosts threads
  check "each rank has a log" test -d "$(echo runs/one-*/ranks)"
  check "mpirun trains on two nodes" exits_with 0 submit two --nodes=2 \
    --ntasks-per-node=1 --cpus-per-task=2 scripts/slurm/mnist.sbatch "${quick[@]}"
  check "its ranks are on two nodes, with the threads that were asked for" \
    says two '{"n1": 1, "n2": 1} [2, 2]' hosts threads
  check "two nodes compute what one computes" same_model one two
}

trains_by_srun() {
  check "srun trains on two nodes" exits_with 0 submit srun --nodes=2 \
    --ntasks-per-node=1 --cpus-per-task=2 scripts/slurm/mnist_srun.sbatch "${quick[@]}"
  check "its ranks are on two nodes" says srun '{"n1": 1, "n2": 1} [2, 2]' hosts threads
  check "srun computes what mpirun computes" same_model one srun
}

fails() {
  check "a job of wrong flags ends with 2" exits_with 2 submit flags \
    scripts/slurm/mnist.sbatch --epochs=none
  check "a job without its data ends with 1" exits_with 1 submit data \
    scripts/slurm/mnist.sbatch --data_dir=/nonexistent
  check "so does srun's" exits_with 1 submit srun-data \
    scripts/slurm/mnist_srun.sbatch --data_dir=/nonexistent
  check "both name the cause" grep -q /nonexistent data.log srun-data.log
  check "lonely ranks end with 1" exits_with 1 srun --quiet --ntasks=2 --mpi=none \
    --output=lonely.log .venv/bin/python -m hvdtrain.mnist "${quick[@]}"
  check "and are told the fix" grep -q 'Received 2 processes from srun' lonely.log
}

# A long job hears of its time limit, and starts again where its node had failed.
is_managed() {
  local job
  job=$(sbatch --parsable --job-name=long --output=long.log scripts/slurm/mnist.sbatch \
    --dataset=digits --max_steps=100000000)
  check "a long job starts" wait_for '^step' long.log
  scancel --batch --signal=USR1 "$job"
  check "it says that its time is over" wait_for 'the time limit is' long.log
  scontrol requeue "$job"
  # Slurm holds a requeued job back for two minutes.
  scontrol update "job=$job" StartTime=now 2>/dev/null || true
  check "it starts again" wait_for 'start number 2' long.log
  scancel "$job"
}

is_an_array() {
  check "an array trains" submit array --array=1-2 --output=array-%a.log \
    scripts/slurm/mnist.sbatch "${quick[@]}"
  check "each task has its seed and directory" \
    test "$(grep -l '"seed": [12]\b' runs/array-*-[12]/summary.json | wc -l)" == 2
}

main() {
  work=$1
  task_plugin=none
  [[ -z $(ls /sys/fs/cgroup 2>/dev/null) ]] || task_plugin=affinity
  quick=(--dataset=digits --max_steps=200)
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  configure
  start_cluster
  make_clone
  echo "slurm test: $(slurmctld -V), two nodes"
  trains
  trains_by_srun
  fails
  is_an_array
  is_managed
  echo "$passed passed, $failed failed"
  ((failed == 0))
}

if [[ ${1:-} == --inside ]]; then
  main "$2"
  exit
fi
check_machine "${1:-}"
"$root/scripts/setup.sh" --quiet
work=$(mktemp -d "${TMPDIR:-/tmp}/slurm-test.XXXXXX")
trap 'rm -rf "$work"' EXIT
# All processes end with the first of the inner namespace, and that one with this.
timeout 2400 unshare --net --mount --uts --pid --fork --kill-child --mount-proc \
  "$0" --inside "$work"
