"""Folders of images: labels, decoding, augmentation, and their errors."""

import functools
import os

import dealing
import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import data

SIZE = 8
BATCH = 6


def picture(number, *, shape=(SIZE, SIZE, 3)):
    """Return an image that no other number has, nor any crop or flip of it."""
    return np.random.RandomState(number).randint(0, 256, shape).astype(np.uint8)


def png(number, **options):
    return tf.io.encode_png(picture(number, **options)).numpy()


@pytest.fixture
def folder(tmp_path):
    """Return a folder of 6 + 9 + 1 images, with other files beside them."""
    number = 0
    for name, count in [("Z", 6), ("b", 9), ("é", 1)]:
        (tmp_path / name).mkdir()
        for i in range(count):
            # Sorted by the bytes of the names: 0, 1 ... have one digit.
            suffix = ("png", "PNG", "Jpeg")[i % 3]
            (tmp_path / name / f"{i}.{suffix}").write_bytes(png(number))
            number += 1
    for name in (".hidden/x.png", "b/.x.png", "b/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "b" / "directory.png").mkdir()
    (tmp_path / "labels.txt").write_bytes(b"")
    return tmp_path


def sampler(source, rank=0, size=1):
    return data.Sampler(
        num_samples=len(source),
        global_batch_size=BATCH,
        seed=3,
        rank=rank,
        size=size,
    )


def augment(sample, seed):
    image, label = sample
    image = tf.image.stateless_random_crop(image, (5, 5, 3), seed)
    return tf.image.stateless_random_flip_left_right(image, seed), label


def images_by_step(source, size, steps, *, transform=None):
    """Return the images of all ranks by step, as sorted bytes."""

    def pairs(batch):
        images, labels = batch
        contents = [image.tobytes() for image in images]
        return list(zip(contents, labels.tolist(), strict=True))

    return dealing.by_step(
        source,
        functools.partial(sampler, source),
        steps,
        size=size,
        ids_of=pairs,
        transform=transform,
    )


def test_images_and_labels(folder):
    source = data.ImageFolder(folder)
    assert source.class_names == ["Z", "b", "é"]
    assert len(source) == 16
    _, labels = source.read(np.arange(16))
    assert labels.dtype == np.int32
    assert labels.tolist() == [0] * 6 + [1] * 9 + [2]
    numbers = np.array([15, 0, 14, 6, 5])
    for number, *sample in zip(numbers, *source.read(numbers), strict=True):
        image, _ = source.decode(tuple(sample))
        assert image.dtype == tf.uint8
        assert np.array_equal(image, picture(number))


def test_a_job_continues_on_other_numbers_of_ranks(folder):
    source = data.ImageFolder(folder)
    alone = images_by_step(source, 1, range(8))
    assert alone == [
        *images_by_step(source, 4, range(3)),
        *images_by_step(source, 3, range(3, 6)),
        *images_by_step(source, 1, range(6, 8)),
    ]
    # Three epochs of 16 samples.
    assert sorted(image for step in alone for image in step) == sorted(
        [(picture(i).tobytes(), int(i >= 6) + int(i >= 15)) for i in range(16)] * 3
    )


def test_a_pass_of_three_ranks_has_each_image_once(folder):
    source = data.ImageFolder(folder)
    found = [
        image.tobytes()
        for rank in range(3)
        for images, _ in data.one_pass(source, rank=rank, size=3, local_batch_size=4)
        for image in images.numpy()
    ]
    assert sorted(found) == sorted(picture(i).tobytes() for i in range(16))


def test_an_augmented_image_is_that_of_its_sample_and_epoch(folder):
    source = data.ImageFolder(folder)
    alone = images_by_step(source, 1, range(8), transform=augment)
    assert images_by_step(source, 2, range(8), transform=augment) == alone
    assert images_by_step(source, 3, range(5, 8), transform=augment) == alone[5:]
    # 3 epochs x 16 samples: a few of 32 crops and flips of a sample occur twice.
    assert len({image for step in alone for image, _ in step}) > 40


def test_images_are_resized_as_by_keras(tmp_path):
    for number, name in enumerate(["a/0.png", "a/1.jpg", "b/0.png"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(png(number, shape=(6 + number, 9, 3)))
    source = data.ImageFolder(tmp_path, image_size=(5, 7))
    [(images, labels)] = data.one_pass(source, rank=0, size=1, local_batch_size=3)
    batches = keras.utils.image_dataset_from_directory(
        tmp_path, image_size=(5, 7), shuffle=False, verbose=False
    )
    [(expected, expected_labels)] = batches
    assert images.dtype == expected.dtype
    assert images.shape == (3, 5, 7, 3)
    assert np.array_equal(images, expected)
    assert labels.dtype == expected_labels.dtype
    assert np.array_equal(labels, expected_labels)


def test_gray_images(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(png(1, shape=(4, 4, 1)))
    source = data.ImageFolder(tmp_path, channels=1)
    [(images, _)] = data.one_pass(source, rank=0, size=1, local_batch_size=1)
    assert np.array_equal(images[0], picture(1, shape=(4, 4, 1)))


def test_folders_with_equal_settings_have_one_decoder(folder):
    small, same, large = (
        data.ImageFolder(folder, image_size=size).decode
        for size in ([8, 8], (8, 8), (9, 8))
    )
    assert small == same
    assert hash(small) == hash(same)
    assert small != large


def test_the_fingerprint_is_that_of_the_names(folder, tmp_path):
    first = data.ImageFolder(folder).fingerprint()
    assert data.ImageFolder(str(folder) + "/../" + folder.name).fingerprint() == first
    os.rename(folder / "b" / "0.png", folder / "b" / "00.png")
    assert data.ImageFolder(folder).fingerprint() != first
    os.rename(folder / "b" / "00.png", folder / "b" / "0.png")
    # The same names, in other classes.
    os.rename(folder / "Z" / "5.Jpeg", folder / "b" / ".png")
    assert data.ImageFolder(folder).fingerprint() != first


def fails(*args, **options):
    with pytest.raises(data.DataError) as error:
        data.ImageFolder(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_directories_without_images(tmp_path):
    assert f"Cannot list {tmp_path / 'no'}: No such file" in fails(tmp_path / "no")
    (tmp_path / "x.png").write_bytes(png(1))
    assert f"Received {tmp_path} without directories; expected" in fails(tmp_path)
    assert "x.png: Not a directory" in fails(tmp_path / "x.png")
    (tmp_path / "a").mkdir()
    assert f"the class {tmp_path / 'a'} without images" in fails(tmp_path)
    assert "image_size=(3,); expected the height" in fails(tmp_path, image_size=(3,))
    assert "channels=2; expected 1, 3 or 4" in fails(tmp_path, channels=2)


def test_a_link_to_nothing_is_no_image_and_no_class_less(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(png(1))
    for link in (tmp_path / "a" / "2.png", tmp_path / "b"):
        link.symlink_to("nothing")
        assert f"Received {link}, a link to a file that does not exist" in fails(
            tmp_path
        )
        link.unlink()


def test_an_image_that_is_written_again(tmp_path):
    path = tmp_path / "a" / "1.png"
    path.parent.mkdir()
    path.write_bytes(png(1))
    source = data.ImageFolder(tmp_path)
    source.read(np.array([0]))
    source.read(np.array([0]))
    path.write_bytes(png(2))
    with pytest.raises(data.DataError, match="png, which has changed since"):
        source.read(np.array([0]))


JPEG = tf.io.encode_jpeg(picture(1, shape=(64, 64, 3))).numpy()
PNG = png(1, shape=(64, 64, 3))


def zeroed(content, start):
    """Return an image whose 8 bytes from `start` on are 0."""
    return content[:start] + bytes(8) + content[start + 8 :]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "which is empty; expected a JPEG or PNG"),
        (b"GIF89a", "which begins with b'GIF89a'; expected a JPEG or PNG"),
        (JPEG[:-2], f"which is truncated after {len(JPEG) - 2} bytes"),
        (JPEG[: len(JPEG) // 2], "which is truncated"),
        (PNG[: len(PNG) // 2], "which is truncated"),
        (zeroed(PNG, len(PNG) // 2), "which is damaged in the"),
        (zeroed(PNG, 20), "which is damaged in the 13 bytes from 16 on"),
        (zeroed(PNG, 34), "which is damaged in the"),
    ],
)
def test_files_that_are_not_images(tmp_path, content, reason):
    path = tmp_path / "a" / "x.jpg"
    path.parent.mkdir()
    path.write_bytes(content)
    source = data.ImageFolder(tmp_path)
    with pytest.raises(data.DataError) as error:
        source.read(np.array([0]))
    assert f"Received {path}, {reason}" in str(error.value)
    path.unlink()
    with pytest.raises(data.DataError, match=f"Cannot read {path}: No such file"):
        source.read(np.array([0]))


def test_bytes_after_the_end_are_accepted(tmp_path):
    (tmp_path / "a").mkdir()
    for name, content in [("x.jpg", JPEG), ("y.png", PNG)]:
        (tmp_path / "a" / name).write_bytes(content + bytes(100))
    source = data.ImageFolder(tmp_path)
    [(images, _)] = data.one_pass(source, rank=0, size=1, local_batch_size=2)
    assert images.shape == (2, 64, 64, 3)
