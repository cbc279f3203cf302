"""Predicts a source of any length: predicting_program.py OUT SAMPLES [options].

--seconds: that each batch takes, so that a job can be killed in the middle.
Prints the growth of this rank's memory after the first tenth of the samples.
"""

import time

import psutil
from absl import flags

from hvdtrain import data, job, program, training

OUT = flags.DEFINE_string("out", None, "The files.", required=True)
SAMPLES = flags.DEFINE_integer("samples", None, "Their number.", required=True)
BATCH = flags.DEFINE_integer("batch", 8, "Samples of a batch.")
PART = flags.DEFINE_integer("part", None, "Samples of a part.")
SECONDS = flags.DEFINE_float("seconds", 0.0, "That the read of a batch takes.")


class Numbers(data.Source):
    """Sample n is n; no sample is in memory."""

    def __init__(self):
        self.most = self.early = 0

    def __len__(self):
        return SAMPLES.value

    def read(self, indices):
        time.sleep(SECONDS.value)
        self.most = max(self.most, psutil.Process().memory_info().rss)
        if indices[-1] < len(self) // 10:
            self.early = self.most
        return indices.astype("float64")


def main():
    world = job.start()
    import keras

    class Doubling(keras.Model):
        def predict_step(self, batch):
            return 2 * batch

    source = Numbers()
    training.predict(
        Doubling(),
        source,
        out=OUT.value,
        local_batch_size=BATCH.value,
        samples_per_part=PART.value,
        world=world,
    )
    print(
        f"rank {world.rank} grew by {(source.most - source.early) >> 20} "
        f"of {source.most >> 20} MB"
    )


if __name__ == "__main__":
    program.run(main, page=__doc__)
