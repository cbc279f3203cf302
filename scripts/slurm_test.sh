#!/usr/bin/env bash
# Starts a temporary Slurm of two nodes, submits the real job scripts to it, and calls
# hvdtrain.run on it.
#
#     scripts/slurm_test.sh [--install]
#
# The nodes n1 and n2 are network namespaces with an address and a slurmd each, inside
# namespaces that end with this script and are not visible outside. Needs root and the
# packages below; --install installs them with apt-get.
set -euo pipefail

title='slurm test'
# Slurm loads libpmix.so, a name that only the development package has.
packages=(iproute2 libpmix-dev slurm-wlm)
install=${1:-}
root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
network=10.99.0
# shellcheck source=scripts/testing.sh
source "$root/scripts/testing.sh"

has_packages() { dpkg-query --show "${packages[@]}" >/dev/null 2>&1; }

check_machine() {
  ((EUID == 0)) || skip "it needs root, to make network namespaces"
  unshare --net --mount --pid --fork --uts true 2>/dev/null ||
    skip "no namespaces may be made here"
  has_packages && return
  [[ -n $install ]] || skip "these are missing (see --install): ${packages[*]}"
  install_packages
}

# A job that waits for a node to be cleared would start half a minute later by default:
# hence SchedulerParameters.
configure() {
  mkdir "$work"/{state,log,munge}
  # Only in this mount namespace.
  mount -t tmpfs tmpfs /run
  mount -t tmpfs tmpfs /etc/slurm
  mkdir -p /run/{munge,netns}
  { echo "127.0.0.1 localhost" && echo "$network.254 head" && echo "$network.1 n1" &&
    echo "$network.2 n2"; } >"$work/hosts"
  mount --bind "$work/hosts" /etc/hosts
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
	TaskPlugin=task/affinity
	SelectType=select/cons_tres
	SelectTypeParameters=CR_CPU
	SchedulerParameters=bf_interval=1,sched_interval=1
	ReturnToService=2
	KillWait=5
	MinJobAge=600
	NodeName=n[1-2] NodeAddr=$network.[1-2] CPUs=2
	PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE
	CONF
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
  # The nodes share /tmp, and PMIx names its directories by the job alone.
  cp /etc/slurm/slurm.conf "$work/$node.etc"
  echo "PMIxCliTmpDirBase=$work/$node.pmix" >"$work/$node.etc/mpi.conf"
  nsenter "--net=/run/netns/$node" unshare --uts --mount sh -c "
    hostname $node && mount --bind $work/$node.etc /etc/slurm &&
      exec slurmd -D -N $node" \
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
  wait_for 60 has_nodes && return
  tail -n 5 "$work"/log/* >&2
  die "Slurm's nodes did not come up within a minute"
}

has_nodes() { [[ $(sinfo -h -t idle -o %D) == 2 ]]; }

# A directory like the clone, so that logs and results stay out of it.
make_clone() {
  mkdir "$work/clone"
  ln -s "$root"/{examples,hvdtrain,scripts,tests,.venv} "$work/clone"
  cd "$work/clone"
  logs=$work/clone
}

# submit NAME [OPTIONS of sbatch] SCRIPT [FLAGS]: waits for the end, and returns the exit
# code of the job. The log is NAME.log.
submit() {
  local name=$1
  shift
  timeout 180 sbatch --quiet --wait --job-name="$name" --output="$name.log" "$@"
}

exits_with() {
  local expected=$1 status=0
  shift
  "$@" || status=$?
  [[ $status =~ ^($expected)$ ]] || ! echo "exit code $status, expected $expected"
}

# summary NAME KEY...: values of the summary of the job NAME.
summary() {
  .venv/bin/python -c '
import json, pathlib, sys
[path] = pathlib.Path("runs").glob(sys.argv[1] + "-[0-9]*/summary.json")
summary = json.loads(path.read_text())
print(*(json.dumps(summary[key]) for key in sys.argv[2:]))' "$@"
}

# has_summary NAME TEXT KEY...: these values of the summary are TEXT.
has_summary() {
  local found=""
  found=$(summary "$1" "${@:3}") && [[ $found == "$2" ]] || ! echo "found $found"
}

is_close() {
  local first="" second=""
  first=$(summary "$1" test_loss) && second=$(summary "$2" test_loss) &&
    awk "BEGIN { exit !(($first - $second) ^ 2 <= (1e-6 * $first) ^ 2) }" ||
    ! echo "$1: $first, $2: $second"
}

same_model() {
  local first="" second=""
  first=$(summary "$1" size steps test_loss) &&
    second=$(summary "$2" size steps test_loss)
  [[ -n $first && $first == "$second" ]] || ! echo "$1: $first, $2: $second"
}

trains() {
  check "mpirun trains on one node" exits_with 0 submit one \
    scripts/slurm/mnist.sbatch "${quick[@]}"
  check "its ranks are on one node" has_summary one '{"n1": 2} [1, 1]' hosts threads
  check "each rank has a log" test -d "$(echo runs/one-*/ranks)"
  check "mpirun trains on two nodes" exits_with 0 submit two --nodes=2 \
    --ntasks-per-node=1 scripts/slurm/mnist.sbatch "${quick[@]}"
  check "its ranks are on two nodes, with a thread for the one core of each" \
    has_summary two '{"n1": 1, "n2": 1} [1, 1]' hosts threads
  check "two nodes compute what one computes" same_model one two
}

trains_by_srun() {
  check "srun trains on two nodes" exits_with 0 submit srun --nodes=2 \
    --ntasks-per-node=1 --cpus-per-task=2 scripts/slurm/mnist_srun.sbatch "${quick[@]}"
  check "its ranks have the two cores that were asked for" \
    has_summary srun '{"n1": 1, "n2": 1} [2, 2]' hosts threads
  # To rounding: with two threads, sums have another order than with one.
  check "srun computes what mpirun computes" is_close one srun
  check "without PMIx, srun trains by Gloo" exits_with 0 timeout 120 srun --quiet \
    --nodes=2 --ntasks=2 --mpi=none --output=no-pmix.log .venv/bin/python \
    -m hvdtrain.mnist "${quick[@]}" --model_dir=runs/no-pmix-0
  check "its ranks are on two nodes" grep '1 on n1, 1 on n2; Gloo' no-pmix.log
  check "it computes what mpirun computes" is_close one no-pmix
}

fails() {
  check "a job of wrong flags ends with 2" exits_with 2 submit flags \
    scripts/slurm/mnist.sbatch --epochs=none
  check "a job without its data ends with 1" exits_with 1 submit data \
    scripts/slurm/mnist.sbatch --data_dir=/nonexistent
  # srun exits with the highest code of all ranks: 143 is a rank that it stopped.
  check "so does srun's, or with 143" exits_with '1|143' submit srun-data \
    scripts/slurm/mnist_srun.sbatch --data_dir=/nonexistent
  check "both name the cause" grep /nonexistent data.log srun-data.log
}

# A job that is asked to stop is requeued, and computes what it would have without.
is_preempted() {
  local plain
  plain=$(submit_longer plain scripts/slurm/mnist.sbatch)
  # As --signal=B:USR1@120 does.
  check "signalled before its time limit, a job continues" \
    continues usr1 '--batch --signal=USR1' scripts/slurm/mnist.sbatch
  # As preemption does: SIGTERM to the tasks of srun.
  check "preempted under srun, too" \
    continues term --signal=TERM scripts/slurm/mnist_srun.sbatch
  check "one that was not signalled ends" wait_for 60 ended "$plain" 0
  check "the three compute the same" same_checkpoint
  check "what may not be requeued ends with 75" ends_with_75
}

# submit_longer NAME [OPTIONS of sbatch] SCRIPT [FLAGS]: prints the job. sbatch --wait
# would look for its end half a minute later.
submit_longer() {
  sbatch --parsable --job-name="$1" --output="$1.log" --nodes=2 --ntasks-per-node=1 \
    "${@:2}" --dataset=digits --max_steps=6000
}

# ended JOB EXIT-CODE
ended() {
  [[ $(scontrol show job "$1") =~ JobState=(COMPLETED|FAILED).*ExitCode=$2:0 ]]
}

# continues NAME OPTIONS-OF-SCANCEL SCRIPT
continues() {
  local job
  job=$(submit_longer "$1" "$3")
  wait_for 60 grep 'samples/s' "$1.log" || return
  # shellcheck disable=SC2086
  scancel $2 "$job"
  # Slurm delays a requeued job by two minutes. Its nodes need a few seconds.
  wait_for 60 is_pending "$job" || return
  scontrol update "job=$job" StartTime=now+5
  wait_for 120 ended "$job" 0 && grep 'Stopped at step' "$1.log" &&
    grep 'start number 2' "$1.log"
}

is_pending() { [[ $(squeue -h -j "$1" -o %t) == PD ]]; }

same_checkpoint() {
  local last=checkpoints/step-00003000-*.safetensors name
  for name in usr1 term; do
    # shellcheck disable=SC2086
    cmp runs/plain-*/$last runs/$name-*/$last || return
  done
}

ends_with_75() {
  local job
  job=$(submit_longer once --no-requeue scripts/slurm/mnist.sbatch)
  wait_for 60 grep 'samples/s' once.log || return
  scancel --batch --signal=TERM "$job"
  wait_for 60 ended "$job" 75 && grep 'not requeued' once.log
}

is_an_array() {
  check "an array trains" submit array --array=1-2 --output=array-%a.log \
    scripts/slurm/mnist.sbatch "${quick[@]}"
  check "each task has its own seed and directory" \
    test "$(grep -l '"seed": [12]\b' runs/array-*-[12]/summary.json | wc -l)" == 2
}

# The second task may ask for its trial while the first one trains.
shares_a_study() {
  check "the tasks of an array train the trials of one study" submit study --array=1-2 \
    --output=study-%a.log examples/optuna_slurm.sbatch --epochs=2 --study=study.journal
  check "each task has a trial of its own" \
    test "$(grep -ho '^trial [01]:' study-[12].log | sort | tr -d '\n')" == 'trial 0:trial 1:'
}

# calls CASE [OPTIONS of hvdtrain.Slurm]: hvdtrain.run, in the program of the tests, by
# `launcher` if it is set. The output is CASE.log.
launcher=()
calls() {
  mkdir -p "$1"
  # The shell lets its background jobs ignore SIGINT.
  timeout 180 "${launcher[@]}" env --default-signal=INT .venv/bin/python \
    tests/commands/running_program.py slurm "$1" "$PWD/$1" "${@:2}" >"$1.log" 2>&1
}

# returns TEXT CASE [OPTIONS]: the program ends with 0, and one of its lines is TEXT.
returns() { calls "${@:2}" && grep -xF "$1" "$2.log"; }

# raises TEXT CASE [OPTIONS]: the program fails, and its last line contains TEXT.
raises() { ! calls "${@:2}" && tail -n 1 "$2.log" | grep -F "$1"; }

is_called_from_python() {
  local nodes='{"nodes": 2}'
  check "hvdtrain.run trains on two nodes" \
    returns 'results [(0, 0, 47), (1, 0, 47)]' digits "$nodes"
  mkdir horovodrun
  check "so does horovodrun on one" .venv/bin/horovodrun -np 2 --gloo .venv/bin/python \
    tests/commands/running_program.py horovodrun digits "$PWD/horovodrun"
  check "both compute the same" cmp {digits,horovodrun}/weights.npz
  check "the logs of a success are deleted" test -z "$(ls digits/slurm)"
  check "each rank has the cores of its task" \
    returns "results [('n1', 2), ('n2', 2)]" cores '{"cpus_per_task": 2}'
  launcher=(srun --quiet --ntasks=1)
  check "a caller inside of a job gets the exception of a rank" \
    returns "caught 1 KeyError('no such column')" raised "$nodes"
  launcher=(env PYTHONPATH=/given)
  check "programs of a rank have the search path of the caller" \
    returns "results ['/given', '/given']" path
  launcher=()
  check "a second job continues after a rank was killed" \
    returns 'results [(0, 15, 47), (1, 15, 47)]' killed_rank "$nodes"
  check "it computes the same, too" cmp {killed_rank,horovodrun}/weights.npz
  check "a job that is signalled before its time limit saves a checkpoint" is_signalled
}

is_signalled() {
  local caller
  calls signalled '{"nodes": 2}' &
  caller=$!
  wait_for 60 grep 'samples/s' signalled.log || return
  scancel --signal=USR2 --name=hvdtrain.run
  ! wait "$caller" && grep 'Stopped at step' signalled.log && ls signalled/model/checkpoints
}

refuses_calls() {
  check "a job that Slurm rejects is one line" \
    raises 'did not accept the job: Batch job submission failed: Invalid partition' \
    full '{"partition": "none"}'
  check "so is a job that does not start" \
    raises ' is PENDING (BeginTime); ' full '{"additional_parameters": {"begin": "now+1hour"}}'
  check "and one that ends before its ranks start" \
    raises ' has ended: no such module. Logs: ' cores \
    '{"setup": ["echo no such module >&2", "exit 3"]}'
  check "Ctrl-C ends the job" ends_with INT waits/rank-0 waits/rank-1
  check "the death of the caller ends it, too" ends_with KILL waits/rank-0 waits/rank-1
  mkdir bin
  # The caller does not get the number of the job.
  printf '#!/bin/sh\n%s "$@" && touch waits/submitted && exec sleep 20 >/dev/null 2>&1\n' \
    "$(command -v sbatch)" >bin/sbatch
  chmod +x bin/sbatch
  launcher=(env "PATH=$PWD/bin:$PATH")
  check "so does Ctrl-C while sbatch runs" ends_with INT waits/submitted
  # It would fail by itself, without its folder.
  check "that job is cancelled" is_last_cancelled
}

# ends_with SIGNAL FILE...: sends it to the caller when there are these files.
ends_with() {
  local caller file
  rm -rf waits
  calls waits '{"nodes": 2}' &
  caller=$!
  for file in "${@:2}"; do
    wait_for 60 test -e "$file" || return
  done
  pkill "-$1" -P "$(pgrep -P "$caller" timeout)" || return
  ! wait "$caller" && wait_for 30 is_queue_empty
}

is_last_cancelled() { [[ $(squeue -h -t all -S -i -o %T | sed -n 1p) == CANCELLED ]]; }

is_queue_empty() { [[ -z $(squeue -h) ]]; }

main() {
  work=$1
  quick=(--dataset=digits --max_steps=200)
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  configure
  start_cluster
  make_clone
  echo "$title: $(slurmctld -V), two nodes"
  trains
  trains_by_srun
  fails
  is_an_array
  shares_a_study
  is_preempted
  is_called_from_python
  refuses_calls
  report
}

if [[ $install == --inside ]]; then
  main "$2"
  exit
fi
work=$(mktemp -d "${TMPDIR:-/tmp}/slurm-test.XXXXXX")
cluster=''
clean() {
  if [[ -n $cluster ]] && kill -KILL "$cluster" 2>/dev/null; then sleep 1; fi
  rm -rf "$work"
}
trap clean EXIT
check_machine
"$root/scripts/setup.sh" --quiet
# All processes end with process 1 of the inner namespace, and that one with unshare. In
# the background: the shell runs a trap only between commands and during `wait`.
unshare --net --mount --uts --pid --fork --kill-child --mount-proc \
  "$0" --inside "$work" &
cluster=$!
wait "$cluster"
