#!/usr/bin/env bash
# Runs the tests, after scripts/setup.sh if needed.
#
#     scripts/test.sh [lint] [unit] [commands] [parallel]      (all four)
#     scripts/test.sh [more_ranks] [oracle] [keras] [oldest] [nightly] [trackers] [hub]
#                     [verify] [engines] [stores] [release]
#
# lint, unit and commands run at the same time. parallel: on two ranks; those of native
# reductions also on two hosts. more_ranks: the tests that those leave out as long, then
# those of the parallel tests that depend on the number of ranks, on three and on four,
# such as models that are sharded over meshes of 2 x 2; three reduce through Horovod, with
# Gloo, and reductions by four also on two hosts, and on three of one, one and two ranks.
# oracle: only those that compare a training on two ranks with one process. keras: oracle,
# and the unit tests that import Keras. oldest: keras, with the oldest Keras of setup.cfg,
# which is downloaded. nightly: keras, with the Keras that comes next. trackers: the
# example that logs to MLflow and to Weights & Biases, which are downloaded. hub: models
# of keras-hub, which is downloaded, on two ranks against one process, and the example that
# trains one. verify: python -m hvdtrain.verify on scripts with one fault each. engines:
# hvdtrain.run on Ray, on Spark and in the notebook of examples/, whose packages are
# downloaded; Spark needs Java. stores: emulators of S3 and of Google's store, which are
# downloaded. release: long tests that CI leaves out, of the package's other tiers: run
# before a release, and after a change of what they test.
#
#     HVDTRAIN_ENVIRONMENT   directory of another environment than .venv, as it is
set -uo pipefail

root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
cd "$root" || exit
tiers=("$@")
((${#tiers[@]})) || tiers=(lint unit parallel commands)
for tier in "${tiers[@]}"; do
  [[ $tier =~ ^(lint|unit|parallel|commands|more_ranks|oracle|keras|oldest|nightly|trackers|hub|verify|engines|stores|release)$ ]] || {
    echo "test: unknown tier '$tier'; there are lint, unit, parallel and commands," \
      "more_ranks, oracle, keras, oldest, nightly, trackers, hub, verify, engines, stores" \
      "and release" >&2
    exit 2
  }
done

[[ -n ${HVDTRAIN_ENVIRONMENT:-} ]] || scripts/setup.sh --quiet || exit
export PATH="${HVDTRAIN_ENVIRONMENT:-$root/.venv}/bin:$PATH"
# For tests that call mpirun: allow root and more ranks than cores. A rank that waits
# yields its core to one that computes.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1

oracles=(
  tests/parallel/test_{optimizer,multi_optimizer,mixed_precision,callbacks_broadcast}.py
  tests/parallel/test_{parallel_dense,parallel_attention,embedding,pipeline,layer_checks}.py
  tests/parallel/test_sharded_saving.py
)
summary=()
overlays=()
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

# beside FUNCTIONS...: at the same time. The output of the first one is shown as it comes,
# that of each other one when those before it have ended.
beside() {
  local directory first=$1 name status lines output=1
  local -A processes
  directory=$(mktemp -d)
  for name; do
    [[ $name == "$first" ]] || exec {output}>"$directory/$name.output"
    (
      summary=() failed=0
      "$name"
      printf '%s\n' "${summary[@]}" >"$directory/$name.summary"
      exit "$failed"
    ) >&"$output" 2>&1 &
    processes[$name]=$!
  done
  for name; do
    status=0
    wait "${processes[$name]}" || status=$?
    ((status == 0)) || failed=1
    [[ $name == "$first" ]] || cat "$directory/$name.output"
    mapfile -t lines <"$directory/$name.summary"
    summary+=("${lines[@]}")
  done
  rm -rf "$directory"
}

lint() { beside style types site; }

style() {
  run "ruff check" 60 ruff check .
  run "ruff format" 60 ruff format --check .
}

types() { run mypy 120 mypy; }

# Broken links and anchors fail the build. Addresses outside of the site are not fetched.
site() {
  local directory
  directory=$(mktemp -d)
  # The theme prints an advertisement for its successor.
  NO_MKDOCS_2_WARNING=1 run site 60 \
    python -m mkdocs build --strict --site-dir "$directory"
  rm -rf "$directory"
}

# unit [FILES]; in two processes, one for each of two cores.
unit() {
  run unit 700 python -m pytest -q -n 2 --dist worksteal \
    -m "not long and not release and not stores" "${@:-tests/unit}"
}

# launched REDUCTION CONTROLLER RANKS TESTS...; ranks share the folder: no cache of
# pytest's. The controller "hosts" is Gloo on several hosts, which are names of this
# machine: two that are alike, and with "unlike" three, of one, one and two ranks. Neither
# launcher tags the lines of rank 0; the other ranks print nothing unless a test fails on
# them.
launched() {
  local -x HVDTRAIN_REDUCTION=$1
  local controller=$2 ranks=$3 launcher=(horovodrun --gloo --no-prefix-rank-0)
  shift 3
  case $controller in
    mpi) launcher=(mpirun --bind-to none) ;;
    hosts)
      launcher+=(-H "localhost:$((ranks / 2)),127.0.0.1:$((ranks / 2))")
      ;;
    unlike) launcher+=(-H "localhost:1,127.0.0.1:1,$(hostname):2") ;;
  esac
  run "$HVDTRAIN_REDUCTION $controller -np $ranks" 1100 \
    "${launcher[@]}" -np "$ranks" \
    python -m pytest -q --color=no -p no:cacheprovider "$@"
}

parallel() {
  launched native mpi 2 -m "not long and not release" tests/parallel
  launched auto hosts 2 -m "not long and not release" \
    tests/parallel/test_native_{reduction,gathering}.py
}

# What the markers of pyproject.toml name.
more_ranks() {
  local reducing=(
    tests/parallel/test_{native_reduction,native_gathering,optimizer,process_sets,tape,threads}.py
    tests/parallel/test_sharded_{state,training}.py
  )
  launched native mpi 2 -m "long and not release" tests/parallel
  run "unit and commands, long" 1500 \
    python -m pytest -q -n 3 --dist loadgroup \
    -m "long and not release and not engines and not stores and not alone" \
    tests/{unit,commands}
  run "commands, alone" 300 python -m pytest -q -m "alone and not release" tests/commands
  launched horovod gloo 3 -m "ranks and not release" tests/parallel
  launched native gloo 4 -m "four_ranks and not release" tests/parallel
  launched native unlike 4 tests/parallel/test_native_{reduction,gathering}.py
  # Layers reduce over groups of ranks, through Horovod, which hosts do not change.
  launched auto hosts 4 -m "four_ranks and not release" "${reducing[@]}"
}

oracle() { launched auto mpi 2 -m "not release" "${oracles[@]}"; }

keras() {
  local files
  mapfile -t files < <(grep -lE '^(import|from) (hvdtrain\.(benchmark|keras)|keras)\b' tests/unit/test_*.py)
  unit "${files[@]}"
  oracle
}

# download NAME ARGUMENTS OF PIP...: sets overlay to a new directory with the packages.
download() {
  overlay=$(mktemp -d)
  overlays+=("$overlay")
  trap 'rm -rf "${overlays[@]}"' EXIT
  # Most modules are never imported: the others are compiled when they are.
  run "$1" 300 python -m pip install --quiet --no-compile --no-deps \
    --target "$overlay" "${@:2}"
}

# with_keras PACKAGE START: with another Keras, whose version has this start.
with_keras() {
  local overlay
  download "$1" "$1" || return
  # Found before the Keras of the environment.
  local -x PYTHONPATH=$overlay
  run "keras is $2" 60 python -c \
    "import keras; assert keras.__version__.startswith('$2'), keras.__version__" || return
  keras
}

oldest() {
  local first
  first=$(sed -n 's/^ *keras>=\([0-9.]*\),.*/\1.0/p' setup.cfg)
  with_keras "keras==$first" "$first"
}

nightly() { with_keras keras-nightly 3.; }

trackers() {
  local overlay
  download "MLflow, wandb" -r scripts/requirements_trackers.txt || return
  local -x PYTHONPATH=$overlay
  run trackers 300 python -m pytest -q tests/commands/test_examples.py -k "mlflow or wandb"
}

hub() {
  local overlay
  download keras-hub -r scripts/requirements_hub.txt || return
  local -x PYTHONPATH=$overlay
  launched auto mpi 2 tests/parallel/test_{keras_hub,fully_shard_hub}.py
  run "example of keras-hub" 300 \
    python -m pytest -q tests/commands/test_examples.py -k gpt2
}

# In two processes, beside those of `unit`: many of these tests wait, for a launcher that
# ends its ranks, a rank that does not come, or a signal that is answered. With more, the
# cores are busy anyway, and tests with limits of a second become late.
commands() {
  run commands 900 \
    python -m pytest -q -n 2 --dist worksteal \
    -m "not long and not release and not verify and not engines and not stores" \
    tests/commands
}

verify() {
  run verify 1400 python -m pytest -q -n 3 -m "verify and not release" tests/commands
}

release() {
  run "unit and commands" 3000 python -m pytest -q -n 3 --dist loadgroup \
    -m "release and not engines" tests/{unit,commands}
  launched native mpi 2 -m release tests/parallel
  with_engines "engines and release"
}

engines() { with_engines "engines and not release"; }

# with_engines MARKERS: in three processes, since their ranks wait for the engine.
with_engines() {
  local overlay
  download "Ray, Spark" -r scripts/requirements_engines.txt || return
  local -x PYTHONPATH=$overlay
  run engines 900 python -m pytest -q -n 3 --dist worksteal -m "$1" tests/commands
}

stores() {
  local overlay
  download "S3, GCS" -r scripts/requirements_stores.txt || return
  local -x PYTHONPATH=$overlay
  run stores 600 python -m pytest -q -n 2 --dist loadgroup -m stores \
    tests/unit tests/commands
}

# At the same time: tests of `commands` wait while those of `unit` compute. The ranks of
# `parallel` compute on both cores.
together=()
for tier in unit commands lint; do
  [[ " ${tiers[*]} " != *" $tier "* ]] || together+=("$tier")
done
((${#together[@]} == 0)) || beside "${together[@]}"
for tier in "${tiers[@]}"; do
  [[ $tier =~ ^(unit|commands|lint)$ ]] || "$tier"
done
echo
printf '%s\n' "${summary[@]}"
exit "$failed"
