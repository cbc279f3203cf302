"""Train a recommender (DLRM) on Parquet files, with embedding tables over the ranks.

    horovodrun -np 2 python examples/dlrm_parquet.py --model_dir=run

Prints a test AUC of 0.78 within 30 s on two cores; 0.87 is the best for these clicks.
The same command continues a stopped job.
"""

import itertools
import tempfile

import numpy as np
from absl import flags

from hvdtrain import data, job, program, training

MODEL_DIR = flags.DEFINE_string("model_dir", None, "Directory of the checkpoints.")
ROWS = {"user": 5_000, "item": 1_000, "country": 50}


def _draw_clicks(count):  # By products of factors of user, item and country.
    random = np.random.default_rng(0)
    ids = {name: random.integers(0, rows, count) for name, rows in ROWS.items()}
    f = {name: random.normal(size=(n, 4))[ids[name]] for name, n in ROWS.items()}
    odds = np.exp(0.7 * (f["item"] * (f["user"] + f["country"])).sum(axis=1))
    return {**ids, "click": random.random(count) < odds / (1 + odds)}


def main():
    """Train and evaluate on all ranks."""
    world = job.start(seed=1)  # Sets what TensorFlow and Horovod read at their import.
    import pyarrow.parquet
    from keras import Input, Model, layers, optimizers

    from hvdtrain import parallel

    def make_model():
        ids = {name: Input((), dtype="int64", name=name) for name in ROWS}
        tables = [layers.Embedding(rows, 8) for rows in ROWS.values()]
        vectors = parallel.DistributedEmbedding(tables)(list(ids.values()))
        products = [layers.Dot(1)(pair) for pair in itertools.combinations(vectors, 2)]
        x = layers.Dense(32, "relu")(layers.Concatenate()([*vectors, *products]))
        model = Model(ids, layers.Dense(1, "sigmoid")(x))
        model.compile(optimizers.Adam(0.01), "binary_crossentropy", metrics=["auc"])
        return model

    def parse(rows):
        return {name: rows[name] for name in ROWS}, rows["click"]

    table, files = pyarrow.table(_draw_clicks(250_000)), []
    with tempfile.TemporaryDirectory() as folder:  # Each rank writes its own files.
        for part in (table[:200_000], table[200_000:]):
            path = f"{folder}/part-{len(files)}.parquet"
            pyarrow.parquet.write_table(part, path, row_group_size=5_000)
            files.append(data.Parquet(path, parse=parse))
        sizes = {"global_batch_size": 1024, "epochs": 3, "model_dir": MODEL_DIR.value}
        training.fit(make_model, files[0], validation=files[1], world=world, **sizes)


program.run(main, page=__doc__)
