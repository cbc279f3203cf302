"""Trains a workload of `benchmarks.loads` with PyTorch's DistributedDataParallel.

python -m torch.distributed.run --standalone --nproc-per-node=2 \
  -m benchmarks.torch_run --load=dlrm --kind=ddp_sparse

`benchmarks.beside_torch` starts it; docs/figures/comparisons.md describes the figures.
"""

import importlib.util

from benchmarks import load_options
from benchmarks.load_options import TORCH_KINDS, TrainingOptions
from hvdtrain import flag_fields, program
from hvdtrain.job import JobError


def main() -> None:
    """Train, print a line, and write the file."""
    options = flag_fields.read_flags(TrainingOptions).of(TORCH_KINDS)
    check_torch()
    # Not at the top: PyTorch may not be installed.
    from benchmarks import torch_training

    rank, figures = torch_training.measure(options)
    if not rank:
        load_options.report(options, figures)


def check_torch() -> None:
    """Raise a `JobError` where PyTorch is not installed."""
    if not importlib.util.find_spec("torch"):
        raise JobError(
            "PyTorch is not installed: install torch, into a directory of PYTHONPATH "
            "that pip install --target has made, if this environment must not change."
        )


if __name__ == "__main__":
    flag_fields.define_flags(TrainingOptions, load_options.CHECKS)
    program.run(main, page=__doc__)
