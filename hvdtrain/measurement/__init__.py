"""What `hvdtrain.benchmark` measures, and how.

docs/benchmark.md describes the figures. `benchmark_options` and
`figures` are plain Python; the other modules load TensorFlow and are imported by name.
"""
