r"""Train ResNet-50 on ImageNet, in the structure of Horovod's Keras example.

    horovodrun -np 8 python examples/imagenet_resnet50.py \
        --train-dir=imagenet/train --val-dir=imagenet/val --checkpoint-dir=run
    horovodrun -np 2 python examples/imagenet_resnet50.py --model=MobileNet \
        --image-size=32 --batch-size=16 --base-lr=0.02 --warmup-epochs=1 --epochs=2

The second command needs no ImageNet: it trains a smaller network on the digits that
hvdtrain ships, and prints a training accuracy of 0.7 within two minutes on two cores.
The validation accuracy is still 0.1: the moving statistics of batch normalization need
more steps. With --epochs=10 it is 0.97. imagenet_resnet50.diff has the lines that
differ from a script for Horovod.

Batch normalization uses the samples of each rank alone, as in Horovod's example. With
--sync-batch-norm it uses those of all ranks, and N ranks compute what one process does.
"""

import argparse
import pathlib

import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import data

parser = argparse.ArgumentParser()
parser.add_argument("--train-dir", help="one directory of JPEG files for each class")
parser.add_argument("--val-dir", help="the same for the validation")
parser.add_argument("--checkpoint-dir", help="the job continues from its newest file")
parser.add_argument("--log-dir", help="for TensorBoard")
parser.add_argument("--model", default="ResNet50", help="of keras.applications")
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--steps-per-epoch", type=int, help="all batches by default")
parser.add_argument("--base-lr", type=float, default=0.0125, help="for one rank")
parser.add_argument("--warmup-epochs", type=float, default=5)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--weight-decay", type=float, default=0.00005)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--sync-batch-norm", action="store_true")
args = parser.parse_args()

hvd.init()
if gpus := tf.config.list_physical_devices("GPU"):
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
keras.utils.set_random_seed(1)


def read_samples(directory, *, is_training):
    """Return this rank's samples: to train, as many as every other rank has."""
    if directory:
        paths = sorted(map(str, pathlib.Path(directory).glob("*/*")))
        names = [pathlib.Path(path).parent.name for path in paths]
        classes = {name: number for number, name in enumerate(sorted(set(names)))}
        x, y = paths, [classes[name] for name in names]
    else:
        digits = data.load("digits")
        classes = range(digits.num_classes)
        x, y = digits.x_train, digits.y_train
        if not is_training:
            x, y = digits.x_test, digits.y_test
    count = len(x) // hvd.size() * hvd.size() if is_training else len(x)
    shard = slice(hvd.rank(), count, hvd.size())
    samples = tf.data.Dataset.from_tensor_slices((x[shard], y[shard]))
    return samples, len(classes)


def read_image(x, y):
    """Return the image, in the size of the model, and its label."""
    if args.train_dir:
        x = tf.io.decode_jpeg(tf.io.read_file(x), channels=3)
    else:
        x = tf.image.grayscale_to_rgb(x)
    x = tf.image.resize(x, (args.image_size, args.image_size))
    return keras.applications.resnet50.preprocess_input(x), y


def flip(x, y):
    """Return the image or its mirror image, with the same label."""
    return tf.image.random_flip_left_right(x), y


train, num_classes = read_samples(args.train_dir, is_training=True)
train = train.shuffle(len(train), seed=1).map(read_image, tf.data.AUTOTUNE)
if args.train_dir:
    train = train.map(flip)
# Batches of one size, and equally many on all ranks.
train = train.batch(args.batch_size, drop_remainder=True).prefetch(2)
if args.steps_per_epoch:
    train = train.take(args.steps_per_epoch)
validation, _ = read_samples(args.val_dir, is_training=False)
validation = validation.map(read_image, tf.data.AUTOTUNE).batch(args.batch_size)

# Rank 0 alone sees the checkpoints. The epoch in which the job continues is broadcast.
checkpoints = []
if args.checkpoint_dir and hvd.rank() == 0:
    checkpoints = sorted(pathlib.Path(args.checkpoint_dir).glob("checkpoint-*.keras"))
newest = checkpoints[-1] if checkpoints else None
first_epoch = hvd.broadcast_object(int(newest.stem.split("-")[1]) if newest else 0, 0)


def synchronize(layer):
    """Return a copy of a layer, with batch normalization over all ranks."""
    if isinstance(layer, keras.layers.BatchNormalization):
        return hvd.SyncBatchNormalization.from_config(layer.get_config())
    return layer.__class__.from_config(layer.get_config())


build_model = getattr(keras.applications, args.model)
model = build_model(
    weights=None,
    input_shape=(args.image_size, args.image_size, 3),
    classes=num_classes,
)
if args.sync_batch_norm:
    model = keras.models.clone_model(model, clone_function=synchronize)
# The learning rate grows with the global batch.
scaled_lr = args.base_lr * hvd.size()
optimizer = keras.optimizers.SGD(
    scaled_lr, momentum=args.momentum, weight_decay=args.weight_decay
)
optimizer.exclude_from_weight_decay(var_names=["bias", "beta", "gamma"])
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
model.compile(
    hvd.DistributedOptimizer(optimizer, compression=compression),
    keras.losses.SparseCategoricalCrossentropy(),
    metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(5, name="top5")],
)
model.optimizer.build(model.trainable_variables)
if newest:
    # With the state of the optimizer. The callback below broadcasts both.
    model.load_weights(newest)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Of batch normalization, so that rank 0 saves the statistics of all ranks.
    hvd.callbacks.AverageMovingStatisticsCallback(),
    # Before callbacks that read the metrics.
    hvd.callbacks.MetricAverageCallback(),
    # From the rate of one rank to that of all ranks, then a tenth at three epochs.
    hvd.callbacks.LearningRateWarmupCallback(
        scaled_lr, warmup_epochs=args.warmup_epochs, verbose=hvd.rank() == 0
    ),
]
for start, end, factor in ((30, 60, 1e-1), (60, 80, 1e-2), (80, None, 1e-3)):
    callbacks.append(
        hvd.callbacks.LearningRateScheduleCallback(
            scaled_lr, multiplier=factor, start_epoch=start, end_epoch=end
        )
    )
# Files are written by rank 0 alone: other ranks would overwrite them.
if args.checkpoint_dir and hvd.rank() == 0:
    path = pathlib.Path(args.checkpoint_dir, "checkpoint-{epoch:03d}.keras")
    callbacks.append(keras.callbacks.ModelCheckpoint(path))
if args.log_dir and hvd.rank() == 0:
    callbacks.append(keras.callbacks.TensorBoard(args.log_dir))

model.fit(
    train,
    epochs=args.epochs,
    initial_epoch=first_epoch,
    validation_data=validation,
    callbacks=callbacks,
    shuffle=False,
    verbose=2 if hvd.rank() == 0 else 0,
)
