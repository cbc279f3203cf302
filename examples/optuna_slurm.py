"""Search hyperparameters with Optuna: one Horovod job trains one trial.

    sbatch --array=1-20%4 examples/optuna_slurm.sbatch
    horovodrun -np 2 python examples/optuna_slurm.py --study=study.log

The first command trains 20 trials, four at a time, on any nodes of a Slurm cluster. The
second trains one trial without Slurm, within a minute on two cores; call it again for
the next one. It prints the accuracy of the trial and the best one, 0.95 after some
trials. A trial whose job is killed keeps the state RUNNING in the study, and the others
go on.
"""

import argparse
import sys

import keras

import hvdtrain.keras as hvd
from hvdtrain import data

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage
except ImportError:
    sys.exit("examples/optuna_slurm.py needs Optuna: pip install optuna")

parser = argparse.ArgumentParser()
parser.add_argument("--study", default="study.log", help="file of the study")
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(1)

# Rank 0 alone opens the study, and gives its choice to the other ranks.
trial = choice = None
if hvd.rank() == 0:
    # A file on the file system that all tasks of the array share.
    study = optuna.create_study(
        study_name="digits",
        storage=JournalStorage(JournalFileBackend(args.study)),
        direction="maximize",
        # constant_liar: tasks that run at the same time try different values.
        sampler=optuna.samplers.TPESampler(constant_liar=True),
        load_if_exists=True,
    )
    trial = study.ask()
    choice = {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "units": trial.suggest_int("units", 32, 256, log=True),
    }
choice = hvd.broadcast_object(choice, root_rank=0)


class Prune(keras.callbacks.Callback):
    """Report each epoch to Optuna, and stop a trial that is worse than others."""

    def on_epoch_end(self, epoch, logs=None):
        trial.report(logs["val_accuracy"], epoch)
        if trial.should_prune():
            self.model.stop_training = True


digits = data.load("digits")
shard = slice(hvd.rank(), len(digits.x_train) // hvd.size() * hvd.size(), hvd.size())
test_shard = slice(hvd.rank(), None, hvd.size())
model = keras.Sequential(
    [
        keras.Input(digits.image_shape),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Flatten(),
        keras.layers.Dense(choice["units"], "relu"),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.Adam(choice["learning_rate"] * hvd.size())
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(optimizer), loss, metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # The accuracy of all ranks, before rank 0 reports it.
    hvd.callbacks.MetricAverageCallback(),
    *([Prune()] if trial else []),
    # Last: when rank 0 stops, all ranks stop at the same step.
    hvd.callbacks.StopTogetherCallback(),
]
history = model.fit(
    digits.x_train[shard],
    digits.y_train[shard],
    batch_size=32,
    epochs=args.epochs,
    validation_data=(digits.x_test[test_shard], digits.y_test[test_shard]),
    callbacks=callbacks,
    verbose=0,
).history
if trial:
    accuracy = history["val_accuracy"][-1]
    if len(history["val_accuracy"]) == args.epochs:
        study.tell(trial, accuracy)
    else:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    print(f"trial {trial.number}: accuracy {accuracy:.4f} with {choice}")
    print(f"best of {len(study.trials)}: {study.best_value:.4f}, {study.best_params}")
