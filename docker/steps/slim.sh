#!/bin/sh
# Deletes from the environment $1 what neither training nor launching needs, and what
# only compilers need: headers, symbols, static libraries.
set -eu
cd "$1"
packages=$(echo lib/python3*/site-packages)

find . -type d \( -name tests -o -name include \) -prune -exec rm -rf {} +
find . -type f -regextype posix-extended \
  -regex '.*\.(a|h|hpp|inc|c|cc|cpp|cu|pyi|pyx|pxd)' -delete
# Only these: strip corrupts libraries whose sections were moved when their wheel was
# repaired for Linux.
find "$packages/tensorflow" "$packages/horovod" "$packages/hvdtrain_native" -name '*.so*' -type f \
  -exec strip --strip-unneeded {} +

# Byte code of the modules that a run imports: without it each start takes seconds more,
# and that of all modules is 160 MB.
PATH=$PWD/bin:$PATH python3 -c '
import horovod.runner.launch, horovod.tensorflow.keras, keras, mpi4py, pytest
import tensorflow, tqdm
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
zeros = tensorflow.zeros((2, 1))
model.fit(zeros, zeros, verbose=0)
'
rm -rf "$packages"/pip "$packages"/pip-* bin/pip* bin/activate* bin/Activate*
