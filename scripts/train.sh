#!/usr/bin/env bash
# Trains MNIST on four ranks, or N, after scripts/setup.sh if needed.
#
#     scripts/train.sh [-np N] [FLAGS of hvdtrain.mnist, see --help]
set -euo pipefail

root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
ranks=4
flags=()
while (($#)); do
  if [[ $1 == -np ]]; then
    [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || {
      echo "train: -np expects a number of ranks, received '${2:-}'" >&2
      exit 2
    }
    ranks=$2
    shift
  else
    flags+=("$1")
  fi
  shift
done

"$root/scripts/setup.sh" --quiet
export PATH="$root/.venv/bin:$PATH"
exec horovodrun --no-prefix-rank-0 -np "$ranks" python -m hvdtrain.mnist "${flags[@]}"
