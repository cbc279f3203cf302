"""What `hvdtrain.benchmark` measures, and how.

docs/benchmark.md describes the figures. `options`, `figures` and `projection` are
plain Python; the other modules load TensorFlow and are imported by name.
"""
