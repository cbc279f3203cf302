"""Tensors and Python objects across ranks, one module for each layer.

From top to bottom: `ops` (what users call), `objects`, `transport` (the only module
that calls Horovod's operations), `graph`, `dtypes`, `threads`,
`process_sets` and `environment`.
"""
