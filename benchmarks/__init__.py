"""How the figures of docs/figures arise, beside `python -m hvdtrain.benchmark`.

Programs for a clone of the project; they are not installed with the package:

python -m benchmarks.allreduce      # time of an allreduce by its size
python -m benchmarks.input_speed    # samples/s of files of small samples
python -m benchmarks.parallelism    # memory, bytes and time of kinds of parallelism
python -m benchmarks.charts         # a picture of --json of allreduce or parallelism

docs/figures/comparisons.md and docs/figures/benchmark.md describe the figures.
"""
