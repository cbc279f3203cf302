#!/bin/sh
# docker run IMAGE [test | FLAGS of hvdtrain.mnist | COMMAND...]
set -eu

train() { exec horovodrun -np 2 python -m hvdtrain.mnist "$@"; }

# Needs no network. Compares two ranks with one process on the big batch, and runs the
# program for MNIST.
smoke_test() {
  cd /opt/hvdtrain/test
  horovodrun -np 2 python -m pytest -q -p no:cacheprovider test_optimizer.py \
    -k 'test_fit_equals_the_big_batch and (plain or accumulation) or missing_reduction'
  train --dataset=digits --max_steps=400
}

case ${1-} in
  test) smoke_test ;;
  -*) train "$@" ;;
  *) exec "$@" ;;
esac
