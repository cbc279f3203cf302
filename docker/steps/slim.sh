#!/bin/sh
# Takes out of the environment $1 what neither trains nor launches, and the compilers'
# part of TensorFlow: headers, symbols, static libraries.
set -eu
cd "$1"
packages=$(echo lib/python3*/site-packages)

find . -type d \( -name tests -o -name include \) -prune -exec rm -rf {} +
find . -type f -regextype posix-extended \
  -regex '.*\.(a|h|hpp|inc|c|cc|cpp|cu|pyi|pyx|pxd)' -delete
# Wheels that were repaired for Linux by shifting sections do not survive strip; these
# two are as their linkers made them.
find "$packages/tensorflow" "$packages/horovod" -name '*.so*' -type f \
  -exec strip --strip-unneeded {} +

# Byte code of what is loaded, and of nothing else: without any, each start takes
# seconds more; that of all modules is 160 MB.
PATH=$PWD/bin:$PATH python3 -c '
import horovod.runner.launch, horovod.tensorflow.keras, keras, mpi4py, pytest
import sklearn.datasets, tensorflow, tqdm
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
zeros = tensorflow.zeros((2, 1))
model.fit(zeros, zeros, verbose=0)
'
rm -rf "$packages"/pip "$packages"/pip-* bin/pip* bin/activate* bin/Activate*
