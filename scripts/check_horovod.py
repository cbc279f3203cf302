"""Checks an installation by an allreduce over two ranks. Run it under horovodrun.

    horovodrun -np 2 python scripts/check_horovod.py

Also checks that Horovod and mpi4py load one MPI library: two crash the process.
"""

import re
from pathlib import Path

import horovod.tensorflow as hvd
import mpi4py
import tensorflow as tf

mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: E402, F401  (loads the library)


def main() -> None:
    """Exits with an error unless the sum over the ranks is right."""
    hvd.init()
    size = hvd.size()
    if size < 2:
        raise SystemExit(f"{size} rank: start this with horovodrun -np 2")
    total = float(hvd.allreduce(tf.constant(hvd.rank() + 1.0), op=hvd.Sum))
    if total != size * (size + 1) / 2:
        raise SystemExit(f"allreduce gave {total} over {size} ranks")
    # libmpi_cxx, Open MPI 4's C++ bindings, is no second MPI.
    maps = Path("/proc/self/maps").read_text()
    libraries = set(re.findall(r"/.*/libmpi(?!_?cxx)[^/\s]*$", maps, re.MULTILINE))
    if len(libraries) > 1:
        raise SystemExit(f"Horovod and mpi4py load two MPIs: {sorted(libraries)}")
    print(f"rank {hvd.rank()} of {size}: the sum is {total}, MPI is {libraries}")


if __name__ == "__main__":
    main()
