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
    die "$PWD has no .venv: submit from the clone of hvdtrain," \
      "and run scripts/setup.sh there before"
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

warn_of_time_limit() {
  echo "$SLURM_JOB_NAME: the time limit is near, and Slurm will end the job there;" \
    "a larger one: sbatch --time=..." >&2
}

# launch COMMAND...: exits with its exit code. In the background: the shell runs a trap
# only between commands and during `wait`.
launch() {
  trap warn_of_time_limit USR1
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
  exit "$status"
}
