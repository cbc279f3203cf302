"""The options of a training of `benchmarks.loads`, with hvdtrain or with PyTorch.

Importing this module loads neither TensorFlow nor PyTorch.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.loads import LOADS, Dlrm, Gpt2
from hvdtrain.benchmark import records, tables
from hvdtrain.benchmark.benchmark_options import SECONDS_CHECK
from hvdtrain.flag_fields import flag_field, path_field
from hvdtrain.job import JobError

# By load, how it is trained; the first is the default.
Kinds = Mapping[str, Sequence[str]]
# With hvdtrain, and with PyTorch.
KERAS_KINDS: Kinds = {
    "gpt2": ("replicated", "state"),
    "dlrm": ("replicated", "together", "row", "column", "tables"),
}
TORCH_KINDS: Kinds = {"gpt2": ("ddp", "zero"), "dlrm": ("ddp", "ddp_sparse")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options of a load. The fields are flags: `--help` describes them."""

    load: str = flag_field("gpt2", "What is trained.", choices=tuple(LOADS))
    dtype: str = flag_field(
        "float32", "Of gpt2's products.", choices=("float32", "bfloat16")
    )
    batch_size: int = flag_field(
        0, "Samples per rank and step, 0 for a default.", low=0, high=1 << 20
    )
    rows: int = flag_field(
        0, "Of each table of dlrm, 0 for a default.", low=0, high=1 << 30
    )
    seconds: float = flag_field(15.0, "Of the timed steps.", low=0, high=600)
    json: str | None = path_field("File to write the figures to.")

    def sized_load(self) -> Gpt2 | Dlrm:
        """Return the load with the sizes of the flags."""
        load = LOADS[self.load]
        if self.batch_size:
            load = dataclasses.replace(load, batch_size=self.batch_size)
        if self.rows and isinstance(load, Dlrm):
            load = dataclasses.replace(load, rows=self.rows)
        return load

    def check(self, flag: str, kinds: Sequence[str], expected: Kinds) -> None:
        """Raise a `JobError` unless a program trains the load so, and in this dtype.

        Args:
            flag: the name of the one that has the kinds.
            kinds: how to train it.
            expected: all kinds of the program.
        """
        known = expected[self.load]
        if wrong := [kind for kind in kinds if kind not in known]:
            raise JobError(
                f"Received --{flag}={','.join(wrong)} with --load={self.load}; "
                f"expected {', '.join(known)}."
            )
        if self.load != "gpt2" and self.dtype != "float32":
            raise JobError(
                f"Received --dtype={self.dtype} with --load={self.load}; expected "
                "float32."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions(LoadOptions):
    """The options of one training. The fields are flags: `--help` describes them."""

    kind: str = flag_field("", "How it is trained; by default replicated, or ddp.")

    def of(self, expected: Kinds) -> "TrainingOptions":
        """Return the options with the default kind of a program.

        Args:
            expected: all kinds of the program.

        Raises:
            JobError: the program does not train this.
        """
        kind = self.kind or expected[self.load][0]
        self.check("kind", [kind], expected)
        return dataclasses.replace(self, kind=kind)


CHECKS = (SECONDS_CHECK,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The figures of one training.

    Attributes:
        samples_per_second: of all ranks.
        peak_resident: the largest resident set of each rank so far, in bytes.
        parameters: how many each rank has.
    """

    samples_per_second: float
    peak_resident: list[int]
    parameters: list[int]


def report(options: TrainingOptions, run: Run) -> None:
    """Print a line of figures, and write the file of `--json`."""
    memory = ", ".join(tables.size_text(each) for each in run.peak_resident)
    print(
        f"{options.load} {options.kind} {options.dtype}: "
        f"{run.samples_per_second:,.1f} samples/s, peak resident {memory}",
        flush=True,
    )
    if options.json:
        records.write_json(options.json, dataclasses.asdict(run))
