# Shared by the job scripts in this directory, which source it in the clone.
set -euo pipefail

die() {
  echo "$SLURM_JOB_NAME: $*" >&2
  exit 1
}

# The environment of the clone; if there is none, the python on the PATH of sbatch.
use_environment() {
  if [[ -x .venv/bin/python ]]; then
    PATH=$PWD/.venv/bin:$PATH
  elif ! python -c 'import hvdtrain' 2>/dev/null; then
    die "$PWD has no .venv, and the python on the PATH of sbatch has no hvdtrain: run" \
      "scripts/setup.sh in the clone before, or activate an environment with hvdtrain"
  fi
}

# One directory per job, the same one after a requeue, and one per task of an array,
# whose index is the seed. --seed or --model_dir on the command line overrides them, as
# the later flag.
run=runs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
run+=${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}
program=(python -m hvdtrain.mnist "--model_dir=$run"
  ${SLURM_ARRAY_TASK_ID:+"--seed=$SLURM_ARRAY_TASK_ID"})
mkdir -p "$run"

# mpirun notices a lost host after half a minute. By default it takes eight minutes.
export OMPI_MCA_oob_tcp_keepalive_time=15 OMPI_MCA_oob_tcp_keepalive_intvl=5
export OMPI_MCA_oob_tcp_keepalive_probes=3

# mpirun and srun forward SIGUSR1 to all ranks. They write a checkpoint, and end with 75.
# At SIGTERM mpirun would kill them within two seconds.
stop_ranks() {
  echo "$SLURM_JOB_NAME: the time limit is near, or the job was asked to stop" >&2
  kill -USR1 "$!" || true
}

# To continue from the checkpoint. Not for ever: with 75 the checkpoint is of a later
# step than the one that the run started from.
requeue() {
  trap '' USR1 TERM
  scontrol requeue "$SLURM_JOB_ID" ||
    echo "$SLURM_JOB_NAME: not requeued; to continue: sbatch ... --model_dir=$run" >&2
}

# launch COMMAND...: exits with its exit code. In the background: the shell runs a trap
# only between commands and during `wait`.
launch() {
  trap stop_ranks USR1 TERM
  echo "$SLURM_JOB_NAME: $*"
  [[ ${SLURM_RESTART_COUNT:-0} == 0 ]] ||
    echo "$SLURM_JOB_NAME: start number $((SLURM_RESTART_COUNT + 1)), after a requeue"
  "$@" &
  local status=0
  wait $! || status=$?
  while kill -0 $! 2>/dev/null; do
    status=0
    wait $! || status=$?
  done
  # The status of an interrupted wait is that of the signal, also where the ranks have
  # ended since.
  status=0
  wait $! || status=$?
  ((status != 75)) || requeue
  exit "$status"
}
