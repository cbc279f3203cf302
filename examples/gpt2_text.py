"""Train a small GPT-2 of keras-hub on bytes of text, packed into rows of 64.

    horovodrun -np 2 python examples/gpt2_text.py

The text is the source code of Python's standard library.
"""

import pathlib

from absl import flags

from hvdtrain import job, program

LENGTH = 64
STEPS = flags.DEFINE_integer("steps", 200, "Steps of 32 rows.")
LORA = flags.DEFINE_integer("lora", 0, "Train adapters of this rank only.", 0)


def main():
    """Train on all ranks, and print the loss on files that were held out."""
    world = job.start(seed=1)
    # After job.start, which sets what TensorFlow and Horovod read at their import.
    import keras
    import keras_hub
    import numpy as np

    from hvdtrain import data, training

    # Bytes are the tokens; the separator does not occur in text.
    paths = sorted(pathlib.Path(pathlib.__file__).parent.glob("*.py"))
    files = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    train, test = (
        data.pack(part, LENGTH, separator=0, shift=True)
        for part in (files[1:], files[:1])
    )

    def make_model():
        backbone = keras_hub.models.GPT2Backbone(
            256, 2, 4, hidden_dim=96, intermediate_dim=384, max_sequence_length=LENGTH
        )
        if LORA.value:
            backbone.enable_lora(LORA.value)
        names = "tokens", "segments", "positions"
        row = {name: keras.Input((LENGTH,), dtype="int32", name=name) for name in names}
        hidden = backbone({"token_ids": row["tokens"], "padding_mask": row["segments"]})
        logits = backbone.token_embedding(hidden, reverse=True)
        model = keras.Model(row, logits)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(2e-3), loss, metrics=["accuracy"])
        return model

    result = training.fit(
        make_model,
        train,
        global_batch_size=32,
        validation=test,
        world=world,
        max_steps=STEPS.value,
    )
    if world.is_chief:
        print(f"test loss {result.test_metrics['loss']:.3f}")


if __name__ == "__main__":
    program.run(main, page=__doc__)
