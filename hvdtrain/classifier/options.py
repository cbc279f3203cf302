"""The options of a training of an image classifier."""

import dataclasses

from hvdtrain import optimizers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run. They have the names and the meaning of `mnist`'s flags."""

    dataset: str
    data_dir: str | None
    model: str
    model_dir: str | None
    save_every_steps: int
    save_every_seconds: float
    keep_checkpoints: int
    skip_nonfinite: bool
    max_minutes: float
    commit_every_steps: int
    batch_size: int
    max_steps: int | None
    epochs: int | None
    optimizer: str
    learning_rate: float | None
    warmup_epochs: float
    decay: str
    seed: int
    accumulation_steps: int
    model_parallel: int
    pipeline_stages: int
    microbatches: int
    pipeline_schedule: str
    shard_optimizer_state: bool
    scale_batch: bool
    compression: str
    mixed_precision: str
    evaluate_every: int
    export: list[str] | None
    consistency_check_steps: int
    steps_per_execution: int
    profile_steps: tuple | None
    timeline_file: str | None

    @property
    def local_learning_rate(self):
        """The learning rate for one rank."""
        return self.learning_rate or optimizers.LEARNING_RATES[self.optimizer]
