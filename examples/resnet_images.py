"""Train a residual network on a folder of images, with augmentation and exact resume.

    horovodrun -np 2 python examples/resnet_images.py --folder=digits --model_dir=run

Prints a test accuracy of 0.97 within 60 s on two cores. If the folder does not exist,
it is made of the digits that hvdtrain ships. The same command continues a stopped job.
"""

from absl import flags

from hvdtrain import job, program

FOLDER = flags.DEFINE_string("folder", "digits", "Of train/ and test/CLASS/*.png.")
MODEL_DIR = flags.DEFINE_string("model_dir", None, "Directory of the checkpoints.")


def main():
    """Train and evaluate on all ranks."""
    world = job.start(seed=1)  # Sets what TensorFlow and Horovod read at their import.
    import tensorflow as tf
    from keras import Input, Model, layers

    from hvdtrain import data, training
    from hvdtrain.job import agreement, files

    with agreement.fail_together(world):  # The other ranks wait until rank 0 is done.
        if world.is_chief and not tf.io.gfile.exists(FOLDER.value):
            digits = vars(data.load("digits"))
            with files.atomic_directory(FOLDER.value) as new:
                for p in ("train", "test"):
                    samples = zip(digits[f"x_{p}"], digits[f"y_{p}"], strict=True)
                    for i, (x, y) in enumerate(samples):
                        tf.io.write_file(f"{new}/{p}/{y}/{i}.png", tf.io.encode_png(x))

    def make_model():
        x = images = Input((28, 28, 1))
        x = layers.Conv2D(16, 3, padding="same")(layers.Rescaling(1 / 255)(x))
        for filters, strides in [(16, 1), (32, 2), (64, 2)]:
            # Not batch normalization: its statistics are of the samples of one rank.
            y = layers.Activation("relu")(layers.GroupNormalization(8)(x))
            y = layers.Conv2D(filters, 3, strides, "same", activation="relu")(y)
            y = layers.Conv2D(filters, 3, 1, "same")(layers.GroupNormalization(8)(y))
            x = layers.Conv2D(filters, 1, strides)(x) + y
        x = layers.Dense(10, "softmax")(layers.GlobalAveragePooling2D()(x))
        model = Model(images, x)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def augment(sample, seed):  # Moves the image by up to two pixels.
        image = tf.image.resize_with_crop_or_pad(sample[0], 32, 32)
        return tf.image.stateless_random_crop(image, (28, 28, 1), seed), sample[1]

    train = data.ImageFolder(f"{FOLDER.value}/train", channels=1)
    test = data.ImageFolder(f"{FOLDER.value}/test", channels=1)
    sizes = {"global_batch_size": 32, "epochs": 6}
    options = {"world": world, "transform": augment, "model_dir": MODEL_DIR.value}
    training.fit(make_model, train, validation=test, **sizes, **options)


program.run(main, page=__doc__)
