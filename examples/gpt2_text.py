"""Train a small GPT-2 of keras-hub on bytes of text in TFRecord, packed into rows.

    horovodrun -np 2 python examples/gpt2_text.py

Prints an evaluation with a loss of 2.57 (5.55 without training) within 40 s on two
cores. The text is the source code of Python's standard library. With --lora=4 only
adapters and biases are trained: 5.23. scripts/requirements_hub.txt has what it needs.
"""

import pathlib
import tempfile

from absl import flags

from hvdtrain import data, job, program, training

LENGTH = 64
LORA = flags.DEFINE_integer("lora", 0, "Train adapters of this rank only.", 0)


def main():
    """Train on all ranks, and evaluate on files that were held out."""
    world = job.start(seed=1)
    # After job.start, which sets what TensorFlow and Horovod read at their import.
    import keras
    import keras_hub
    import tensorflow as tf

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

    texts = sorted(pathlib.Path(pathlib.__file__).parent.glob("*.py"))
    sizes = {"global_batch_size": 32, "max_steps": 300}
    with tempfile.TemporaryDirectory() as folder:  # Each rank writes its own files.
        sources = []
        for part in (texts[8:], texts[:8]):
            path = f"{folder}/{len(sources)}.tfrecord"
            with tf.io.TFRecordWriter(path) as file:
                for text in part:
                    file.write(text.read_bytes())
            # Bytes are the tokens; text has no byte 0, which separates the files.
            row = {"dtype": "uint8", "separator": 0, "shift": True}
            sources.append(data.pack(data.TFRecord(path), LENGTH, **row))
        training.fit(gpt2, sources[0], validation=sources[1], world=world, **sizes)


program.run(main, page=__doc__)
