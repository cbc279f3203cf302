"""Logs a job to one run of Weights & Biases; WANDB_MODE=offline needs no account."""

import pathlib
import uuid

import wandb


class Observer:
    """The id of the run is kept in `model_dir`: a job that continues logs to it."""

    def __init__(self, model_dir):
        path = pathlib.Path(model_dir, "wandb_run_id")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        self.run = wandb.init(id=path.read_text(), resume="allow", dir=model_dir)
        # The step is a value. As wandb's own step it could not decrease, and values
        # that a continued job logs again from its checkpoint would be dropped.
        self.run.define_metric("*", step_metric="step")

    def on_progress(self, progress):
        values = progress.metrics | {"learning_rate": progress.learning_rate}
        self.run.log(values | {"step": progress.step})

    def on_evaluation(self, step, metrics):
        values = {f"test_{name}": value for name, value in metrics.items()}
        self.run.log(values | {"step": step})
