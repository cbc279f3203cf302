"""Train a small GPT-2 of keras-hub on bytes of text, packed into rows of 64.

    horovodrun -np 2 python examples/gpt2_text.py

Prints an evaluation with a loss of 2.57 (5.55 without training) within 40 s on two
cores. The text is the source code of Python's standard library. With --lora=4 only
adapters and biases are trained, as one does with weights that are loaded: 5.23.
scripts/requirements_hub.txt has the packages that it needs, keras-hub among them.
"""

import pathlib

from absl import flags

from hvdtrain import job, program

LENGTH = 64
LORA = flags.DEFINE_integer("lora", 0, "Train adapters of this rank only.", 0)


def main():
    """Train on all ranks, and evaluate on files that were held out."""
    world = job.start(seed=1)
    # After job.start, which sets what TensorFlow and Horovod read at their import.
    import keras
    import keras_hub
    import numpy as np

    from hvdtrain import data, training

    # Bytes are the tokens; text has no byte 0, which separates the files.
    paths = sorted(pathlib.Path(pathlib.__file__).parent.glob("*.py"))
    files = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    train, test = (
        data.pack(part, LENGTH, separator=0, shift=True)
        for part in (files[8:], files[:8])
    )

    def gpt2():
        backbone = keras_hub.models.GPT2Backbone(
            256, 2, 4, hidden_dim=96, intermediate_dim=384, max_sequence_length=LENGTH
        )
        if LORA.value:
            backbone.enable_lora(LORA.value)
        names = "tokens", "segments", "positions"
        row = {name: keras.Input((LENGTH,), dtype="int32", name=name) for name in names}
        # No token is padding: segments are 1 or more.
        hidden = backbone({"token_ids": row["tokens"], "padding_mask": row["segments"]})
        model = keras.Model(row, backbone.token_embedding(hidden, reverse=True))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(2e-3), loss, metrics=["accuracy"])
        return model

    training.fit(
        gpt2, train, global_batch_size=32, validation=test, world=world, max_steps=300
    )


if __name__ == "__main__":
    program.run(main, page=__doc__)
