"""Tensors and Python objects across ranks, one module for each layer.

From top to bottom: `ops` (what users call), `objects`, `transport` (the only module
that calls Horovod's operations), `graph`, `dtypes`, `threads` and `process_sets`.
"""

# First: it raises one line where the libraries do not fit each other.
from hvdtrain import libraries
