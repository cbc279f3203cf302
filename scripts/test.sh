#!/usr/bin/env bash
# Runs the tests, after scripts/setup.sh if needed.
#
#     scripts/test.sh [lint] [unit] [parallel] [commands]      (all four)
#     scripts/test.sh [more_ranks] [oracle] [oldest]
#
# parallel: on two ranks. more_ranks: the tests that those leave out as long, then those of
# the parallel tests that depend on the number of ranks, on three and on four, such as
# models that are sharded over meshes of 2 x 2; three reduce through Horovod, with Gloo. oracle: only those that compare a training on
# two ranks with one process. oldest: oracle, and the unit tests that import Keras, with
# the oldest Keras of setup.cfg, which is downloaded.
set -uo pipefail

root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
cd "$root" || exit
tiers=("$@")
((${#tiers[@]})) || tiers=(lint unit parallel commands)
for tier in "${tiers[@]}"; do
  [[ $tier =~ ^(lint|unit|parallel|commands|more_ranks|oracle|oldest)$ ]] || {
    echo "test: unknown tier '$tier'; there are lint, unit, parallel and commands," \
      "more_ranks, oracle and oldest" >&2
    exit 2
  }
done

scripts/setup.sh --quiet || exit
export PATH="$root/.venv/bin:$PATH"
# For tests that call mpirun: allow root and more ranks than cores. A rank that waits
# yields its core to one that computes.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1

oracles=(
  tests/parallel/test_{optimizer,mixed_precision,callbacks_broadcast}.py
  tests/parallel/test_{parallel_dense,parallel_attention,embedding,pipeline,layer_checks}.py
  tests/parallel/test_full_saving.py
)
summary=()
failed=0

# run TIER SECONDS COMMAND...: one line of the summary.
run() {
  local name=$1 limit=$2 start=$SECONDS result=passed status=0
  shift 2
  echo "== $name: $*"
  timeout -k 20 "$limit" "$@" || status=$?
  case $status in
    0) ;;
    124 | 137) result="timed out after $limit s" ;;
    *) result="FAILED (exit code $status)" ;;
  esac
  ((status == 0)) || failed=1
  summary+=("$(printf '%-24s %s, %d s' "$name" "$result" $((SECONDS - start)))")
  return "$status"
}

lint() {
  run "ruff check" 60 ruff check .
  run "ruff format" 60 ruff format --check .
  run mypy 120 mypy
}

# unit [FILES]; in two processes, one for each of two cores.
unit() { run unit 300 python -m pytest -q -n 2 --dist worksteal "${@:-tests/unit}"; }

# launched REDUCTION CONTROLLER RANKS TESTS...; ranks share the folder: no cache of
# pytest's.
launched() {
  local -x HVDTRAIN_REDUCTION=$1
  local controller=$2 ranks=$3
  shift 3
  run "$HVDTRAIN_REDUCTION $controller -np $ranks" 600 \
    horovodrun "--$controller" -np "$ranks" \
    python -m pytest -q --color=no -p no:cacheprovider "$@"
}

parallel() { launched shared_memory mpi 2 -m "not long" tests/parallel; }

# What the markers of pyproject.toml name.
more_ranks() {
  launched shared_memory mpi 2 -m long tests/parallel
  run "commands, long" 600 python -m pytest -q -n 2 -m long tests/commands
  launched horovod gloo 3 -m ranks tests/parallel
  launched shared_memory gloo 4 -m four_ranks tests/parallel
}

oracle() { launched auto mpi 2 "${oracles[@]}"; }

oldest() {
  local keras files
  keras=$(sed -n 's/^ *keras>=\([0-9.]*\),.*/\1.0/p' setup.cfg)
  overlay=$(mktemp -d)
  trap 'rm -rf "$overlay"' EXIT
  run "keras $keras" 120 python -m pip install --quiet --no-deps --target "$overlay" \
    "keras==$keras" || return
  # Found before the Keras of the environment.
  local -x PYTHONPATH=$overlay
  run "keras is $keras" 60 python -c \
    "import keras; assert keras.__version__ == '$keras', keras.__version__" || return
  mapfile -t files < <(grep -lE '^(import|from) (hvdtrain\.)?keras' tests/unit/test_*.py)
  unit "${files[@]}"
  oracle
}

# In two processes: most of the time is TensorFlow's import, which uses one core.
commands() {
  run commands 1200 python -m pytest -q -n 2 --dist loadgroup -m "not long" tests/commands
}

for tier in "${tiers[@]}"; do "$tier"; done
echo
printf '%s\n' "${summary[@]}"
exit "$failed"
