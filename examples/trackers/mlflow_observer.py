"""Logs a job to one run of MLflow, at the address in MLFLOW_TRACKING_URI."""

import pathlib

import mlflow


class Observer:
    """The id of the run is kept in `model_dir`: a job that continues logs to it."""

    def __init__(self, model_dir):
        path = pathlib.Path(model_dir, "mlflow_run_id")
        path.parent.mkdir(parents=True, exist_ok=True)
        run = mlflow.start_run(path.read_text() if path.exists() else None)
        path.write_text(run.info.run_id)

    def on_progress(self, progress):
        values = progress.metrics | {"learning_rate": progress.learning_rate}
        mlflow.log_metrics(values, step=progress.step)

    def on_evaluation(self, step, metrics):
        values = {f"test_{name}": value for name, value in metrics.items()}
        mlflow.log_metrics(values, step=step)
