"""What `python -m hvdtrain.benchmark` measures, and how.

docs/figures/benchmark.md describes the figures. The modules `benchmark_options`,
`figures`, `records` and `tables` load no TensorFlow; import the others by name.
"""
