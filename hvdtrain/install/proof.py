"""Checks an installation by an allreduce over two ranks. Run it under horovodrun.

    horovodrun -np 2 python -P hvdtrain/install/proof.py [LIBRARY]

LIBRARY is the native operations, which are loaded. Also checks that Horovod and mpi4py
load one MPI library: two crash the process. Imports no module of hvdtrain, whose own
checks would end first.
"""

import importlib.util
import re
import sys
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf


def main() -> None:
    """Exit with an error unless the sum over the ranks is right."""
    for library in sys.argv[1:]:
        tf.load_op_library(library)
    hvd.init()
    size = hvd.size()
    if size < 2:
        raise SystemExit(f"{size} rank: start this with horovodrun -np 2")
    total = float(hvd.allreduce(tf.constant(hvd.rank() + 1.0), op=hvd.Sum))
    if total != size * (size + 1) / 2:
        raise SystemExit(f"allreduce gave {total} over {size} ranks")
    libraries = _mpi_libraries()
    if len(libraries) > 1:
        raise SystemExit(f"Horovod and mpi4py load two MPIs: {sorted(libraries)}")
    print(f"rank {hvd.rank()} of {size}: the sum is {total}, MPI is {libraries}")


def _mpi_libraries() -> set[str]:
    """Return the paths of the MPIs in this process, after the import of mpi4py."""
    if importlib.util.find_spec("mpi4py"):
        mpi4py = importlib.import_module("mpi4py")
        mpi4py.rc.initialize = False
        importlib.import_module("mpi4py.MPI")
    # libmpi_cxx, Open MPI 4's C++ bindings, is no second MPI.
    maps = Path("/proc/self/maps").read_text()
    return set(re.findall(r"/.*/libmpi(?!_?cxx)[^/\s]*$", maps, re.MULTILINE))


if __name__ == "__main__":
    main()
