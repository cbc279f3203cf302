"""Samples that are image files in one directory for each class."""

import bisect
import dataclasses
import hashlib
import operator
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.formats import DataError, changed
from hvdtrain.data.sources.remote_files import (
    RemoteFile,
    list_directory,
    map_concurrently,
    open_store,
    read_ranges,
)
from hvdtrain.data.sources.source import Source
from hvdtrain.job.files import is_address, local_path, one_line_errors

_SUFFIXES = (b".jpg", b".jpeg", b".png")
_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
# The last bytes of a complete file. Some cameras and programs write others after them.
_ENDS = {_JPEG: b"\xff\xd9", _PNG: b"IEND"}
_END_BYTES = 1024
_READABLE = "expected a directory that this user may read: check its path"


@dataclasses.dataclass(frozen=True)
class DecodeImage:
    """A function of TensorFlow: (encoded bytes, label) to (image, label)."""

    image_size: tuple[int, int] | None
    channels: int

    def __call__(self, sample: tuple[tf.Tensor, tf.Tensor]) -> Any:
        content, label = sample
        image = tf.io.decode_image(
            content, channels=self.channels, expand_animations=False
        )
        image.set_shape((None, None, self.channels))
        if self.image_size:
            image = tf.image.resize(image, self.image_size)
        return image, label


class ImageFolder(Source):
    """The images `directory/class/name.jpg`, with the number of their class.

    Files with the suffixes jpg, jpeg and png are images, in upper or lower case; other
    files, and names that begin with a dot, are ignored. The classes are numbered, and
    the images of a class ordered, by the bytes of their names. A sample is a pair of an
    image and an int32 label.

    Without `image_size` the image is uint8. With it the image is resized, by bilinear
    interpolation without antialiasing, and float32, as
    `keras.utils.image_dataset_from_directory` does by default. Values are 0 to 255.

    Each process lists the directories once, and keeps the names in memory: the length
    of its name and 16 bytes for each image. An image on a disk that was written again
    since it was first read is an error.

    Args:
        directory: a path, or the address of a directory in a store.
        image_size: height and width of the images. None keeps the size in the file: all
            images must have one size then, unless `map_samples` crops them.
        channels: 1 for gray, 3 for colors, 4 with transparency.

    Attributes:
        class_names: names of the classes, by label.

    Raises:
        DataError: the directory or a class cannot be read, there are no classes, or a
            class has no images.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        image_size: tuple[int, int] | None = None,
        channels: int = 3,
    ) -> None:
        if channels not in (1, 3, 4):
            raise DataError(f"Received channels={channels}; expected 1, 3 or 4.")
        self.decode = DecodeImage(image_size and _checked(image_size), channels)
        self.is_remote = is_address(directory)
        if self.is_remote:
            self._filesystem, self._root = open_store(os.fspath(directory))
            self._directory = self._filesystem.unstrip_protocol(self._root)
        else:
            self._directory = self._root = str(pathlib.Path(local_path(directory)))
        classes = self._list("", "directory")
        visible = (name for name in classes if not name.startswith("."))
        self.class_names = sorted(visible, key=os.fsencode)
        if not self.class_names:
            raise DataError(
                f"Received {self._directory} without directories; expected one "
                "directory of images for each class."
            )
        # The number of the first image of each class, and the number of images.
        self._class_starts = [0]
        # One object of Python for each name would take several times the memory.
        names, lengths, sizes = bytearray(), [], []
        list_images = map_concurrently if self.is_remote else map
        for images in list_images(self._list_images, self.class_names):
            self._class_starts.append(self._class_starts[-1] + len(images))
            names += b"".join(images)
            lengths.append(np.array([len(image) for image in images], np.int64))
            sizes.append(np.array(list(images.values()), np.int64))
        self._names = bytes(names)
        self._ends = np.cumsum(np.concatenate(lengths))
        # In a store, their sizes. On a disk, when an image was written, from its first
        # read on: listing the times would take a request for each image where the disk
        # is a network's.
        self._versions = np.concatenate(sizes)

    def __len__(self) -> int:
        return self._class_starts[-1]

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        contents = np.empty(len(indices), object)
        names = [self._name(index) for index in indices.tolist()]
        read = self._read_remote if self.is_remote else self._read_local
        found = zip(names, read(names, indices), strict=True)
        for place, (name, content) in enumerate(found):
            _check_image(content, f"{self._directory}/{name}")
            contents[place] = content
        return contents, self._labels(indices).astype(np.int32)

    def fingerprint(self) -> Any:
        digest = hashlib.sha256(self._names)
        digest.update(self._ends.tobytes() + repr(self._class_starts).encode())
        digest.update(repr(self.class_names).encode())
        return {
            "samples": len(self),
            "classes": len(self.class_names),
            "digest": digest.hexdigest(),
        }

    def _labels(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._class_starts, indices, side="right") - 1

    def _list_images(self, class_name: str) -> dict[bytes, int]:
        """Return the names of the images of a class, sorted, and their sizes."""
        sizes = {os.fsencode(n): s for n, s in self._list(class_name, "file").items()}
        names = sorted(
            n for n in sizes if n.lower().endswith(_SUFFIXES) and n[:1] != b"."
        )
        if not names:
            raise DataError(
                f"Received the class {self._directory}/{class_name} without images; "
                "expected files with the suffix jpg, jpeg or png: add some, or remove "
                "the directory."
            )
        return {name: sizes[name] for name in names}

    def _list(self, name: str, kind: str) -> dict[str, int]:
        """Return the names of "file" or "directory", and, in a store, the sizes."""
        directory = os.path.join(self._root, name) if name else self._root
        if self.is_remote:
            return list_directory(self._filesystem, directory, kind)
        is_kind = os.DirEntry.is_dir if kind == "directory" else os.DirEntry.is_file
        with (
            one_line_errors(f"list {directory}", remedy=_READABLE, raises=DataError),
            os.scandir(directory) as entries,
        ):
            return {entry.name: 0 for entry in entries if _exists(entry, is_kind)}

    def _name(self, index: int) -> str:
        label = bisect.bisect_right(self._class_starts, index) - 1
        start = self._ends[index - 1] if index else 0
        name = os.fsdecode(self._names[start : self._ends[index]])
        return f"{self.class_names[label]}/{name}"

    def _read_local(self, names: list[str], indices: np.ndarray) -> Iterator[bytes]:
        for name, index in zip(names, indices.tolist(), strict=True):
            path = f"{self._directory}/{name}"
            content, time = _read_file(path)
            if self._versions[index] not in (0, time):
                raise changed(path)
            self._versions[index] = time
            yield content

    def _read_remote(self, names: list[str], indices: np.ndarray) -> Iterable[bytes]:
        ranges = []
        for name, size in zip(names, self._versions[indices].tolist(), strict=True):
            path, key = f"{self._directory}/{name}", f"{self._root}/{name}"
            ranges.append((RemoteFile(self._filesystem, path, key, size, ""), 0, size))
        return read_ranges(ranges)


def _exists(
    entry: os.DirEntry[str], is_kind: Callable[[os.DirEntry[str]], bool]
) -> bool:
    if is_kind(entry):
        return True
    # Without the error, the samples or the classes would be fewer.
    suffix = os.path.splitext(entry.name)[1].lower()
    is_wanted = suffix.encode() in (b"", *_SUFFIXES) and not entry.name.startswith(".")
    if is_wanted and entry.is_symlink() and not os.path.exists(entry.path):
        raise DataError(
            f"Received {entry.path}, a link to a file that does not exist; expected an "
            "image or a class: fetch it, or remove the link."
        )
    return False


def _read_file(path: str) -> tuple[bytes, int]:
    """Return the content of a file, and when it was written last."""
    with (
        one_line_errors(
            f"read {path}",
            remedy="expected an image that this user may read: fetch it again, or "
            "change its permissions",
            raises=DataError,
        ),
        open(path, "rb") as file,
    ):
        return file.read(), os.fstat(file.fileno()).st_mtime_ns


def _checked(image_size: tuple[int, int]) -> tuple[int, int]:
    try:
        height, width = map(operator.index, image_size)
    except (TypeError, ValueError):
        height = width = 0
    if min(height, width) < 1:
        raise DataError(
            f"Received image_size={image_size}; expected the height and the width."
        )
    return height, width


def _check_image(content: bytes, path: str) -> None:
    """Raise `DataError` unless the content is a complete JPEG or PNG."""
    if not content:
        raise DataError(f"Received {path}, which is empty; expected a JPEG or PNG.")
    kind = next((kind for kind in _ENDS if content.startswith(kind)), None)
    if not kind:
        raise DataError(
            f"Received {path}, which begins with {content[:8]!r}; expected a JPEG or "
            "PNG: convert it, or remove it."
        )
    if _ENDS[kind] not in content[-_END_BYTES:]:
        raise DataError(
            f"Received {path}, which is truncated after {len(content)} bytes; expected "
            "a complete image: fetch it again, or remove it."
        )
    if kind == _PNG:
        _check_png(content, path)


def _check_png(content: bytes, path: str) -> None:
    """Check the CRC of each chunk that is needed for the pixels."""
    start, kind = len(_PNG), b""
    while kind != b"IEND":
        length = int.from_bytes(content[start : start + 4])
        kind, end = content[start + 4 : start + 8], start + 8 + length
        # A lower-case letter marks a chunk of text, times and so on.
        is_needed = not kind[:1].islower()
        crc = int.from_bytes(content[end : end + 4])
        is_intact = zlib.crc32(content[start + 4 : end]) == crc or not is_needed
        if end + 4 > len(content) or not is_intact:
            raise DataError(
                f"Received {path}, which is damaged in the {length} bytes from "
                f"{start + 8} on; expected a PNG: fetch it again, or remove it."
            )
        start = end + 4
