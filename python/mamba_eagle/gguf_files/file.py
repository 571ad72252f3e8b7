"""GGUF files: what stands in front of the weights, and the weights' bytes.

The header is read here and not by ``gguf.GGUFReader``, which makes several numpy arrays for each
entry of a list: for a vocabulary of 100,000 tokens it takes seconds, and three processes read the
file. Versions 2 and 3 of the format, little-endian, are read
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from mamba_eagle.model_config import UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of the tensors' bytes, unless general.alignment says otherwise
MAX_ENTRIES = 1 << 20  # tensors or keys: a number that only a broken file exceeds
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")

# value type of the format -> how struct reads one
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, LIST = 8, 9

# Files that are named Q4_K_M hold some tensors in Q5_0, Q5_K or Q6_K.
TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_0", "Q5_K", "Q6_K")


class TensorInfo(NamedTuple):
    """A tensor as the header describes it."""

    name: str
    shape: tuple[int, ...]  # rows first, as torch has it; the file counts the other way round
    dtype: str  # ggml's name: F32, Q8_0, …
    offset: int  # of its first byte in the file
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: blocks never cross rows."""
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.dtype]]
        return self.shape[-1] // block * size


@dataclass(frozen=True)
class GgufFile:
    """A file's header. ``metadata`` has numbers, texts, and lists of either."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "?"))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own keys: ``block_count`` for ``mamba2.block_count``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Raises: UnsupportedModel if the file lacks the key."""
        value = self.get(key)
        if value is None:
            raise UnsupportedModel(
                f"{self.path} lacks {self.architecture}.{key}: convert the checkpoint again with "
                "a newer convert_hf_to_gguf.py"
            )
        return value

    def bytes_of(self, info: TensorInfo) -> NDArray[np.uint8]:
        """A tensor's bytes, as a view of the mapped file, of which a writer gets a copy:
        [rows, bytes of a row]."""
        data = np.memmap(self.path, np.uint8, "c", info.offset, (info.nbytes,))
        return np.asarray(data).reshape(-1, info.row_bytes)


def open_gguf(path: str | Path) -> GgufFile:
    """The header of a file; remembered until the file changes.

    Raises: UnsupportedModel, OSError
    """
    path = Path(path)
    found = path.stat()
    return _open(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=4)
def _open(path: Path, changed: int, size: int) -> GgufFile:
    if parts := PART.search(path.name):
        raise _in_parts(path, int(parts[1]))
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise UnsupportedModel(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _header(path, _Cursor(data))
            except (struct.error, UnicodeDecodeError, IndexError, MemoryError) as error:
                raise UnsupportedModel(
                    f"{path}: the header cannot be read ({error}); download the file again"
                ) from None
    if (count := int(header.metadata.get("split.count", 1))) > 1:
        raise _in_parts(path, count)
    end = 0
    for info in sorted(header.tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset < end:
            raise UnsupportedModel(
                f"{path}: {info.name} begins at byte {info.offset}, inside the tensor before it; "
                "download the file again"
            )
        end = info.offset + info.nbytes
    if end > size:
        raise UnsupportedModel(
            f"{path} ends after {size} bytes and its tensors after {end}; download it again"
        )
    return header


def _in_parts(path: Path, count: int) -> UnsupportedModel:
    return UnsupportedModel(
        f"{path} is one of {count} parts of a model; join them with llama.cpp's "
        "llama-gguf-split --merge FIRST_PART OUTPUT and give OUTPUT"
    )


class _Cursor:
    """Reads a file from front to back."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 4

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def count(self, limit: int = 1 << 32) -> int:
        """Raises: IndexError for a number that no file has."""
        value: int = self.number("<Q")
        if value > limit:
            raise IndexError(f"{value} entries at byte {self.at}")
        return value

    def raw(self, length: int) -> bytes:
        found = self.data[self.at : self.at + length]
        if len(found) < length:
            raise IndexError(f"the file ends at byte {len(self.data)}")
        self.at += length
        return found

    def text(self) -> str:
        return self.raw(self.count()).decode()

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind == LIST:
            return self.values()
        raise IndexError(f"value type {kind} at byte {self.at}")

    def values(self) -> list[Any]:
        kind, count = self.number("<I"), self.count()
        if kind in SCALARS:
            form = np.dtype(SCALARS[kind])
            return np.frombuffer(self.raw(count * form.itemsize), form).tolist()
        if kind == STRING:
            return list(self._texts(count))
        return [self.value(kind) for _ in range(count)]

    def _texts(self, count: int) -> Iterator[str]:
        """Most of a header are the texts of its tokens and merges."""
        data, at = self.data, self.at
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(data[at:begin], "little")
            found = data[begin:at]
            if len(found) < at - begin:
                raise IndexError(f"the file ends at byte {len(data)}")
            yield found.decode()
        self.at = at


def _header(path: Path, cursor: _Cursor) -> GgufFile:
    version = cursor.number("<I")
    if version not in VERSIONS:
        raise UnsupportedModel(
            f"{path}: GGUF version {version}; known: {list(VERSIONS)}, little-endian. Convert the "
            "checkpoint again with llama.cpp's convert_hf_to_gguf.py"
        )
    num_tensors, num_values = cursor.count(MAX_ENTRIES), cursor.count(MAX_ENTRIES)
    metadata = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("<I"))
    described = [_described(cursor) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", ALIGNMENT))
    if alignment < 1:
        raise IndexError(f"general.alignment {alignment}")
    begin = -(-cursor.at // alignment) * alignment
    refused: dict[str, int] = {}
    tensors = {}
    for name, shape, kind, offset in described:
        dtype = _type_name(kind)
        if dtype not in TENSOR_TYPES:
            refused[dtype] = refused.get(dtype, 0) + 1
            continue
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
        if name in tensors:
            raise IndexError(f"{name} is there twice")
        if shape[-1] % block:
            raise IndexError(f"{name} of {dtype} has rows of {shape[-1]}")
        nbytes = int(np.prod(shape, dtype=np.int64)) // block * size
        tensors[name] = TensorInfo(name, shape, dtype, begin + offset, nbytes)
    if refused:
        counts = ", ".join(f"{count} × {name}" for name, count in sorted(refused.items()))
        raise UnsupportedModel(
            f"{path} has tensors of types that are not supported ({counts}); known: "
            f"{', '.join(TENSOR_TYPES)}. Take a Q8_0, Q4_0 or Q4_K_M file of this model"
        )
    return GgufFile(path, metadata, tensors)


def _described(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Of the next tensor: its name, shape, type, and where it begins behind the header."""
    name = cursor.text()
    sizes = [cursor.count() for _ in range(min(cursor.number("<I"), 8))]
    return name, tuple(reversed(sizes)) or (1,), cursor.number("<I"), cursor.count(1 << 62)


def _type_name(kind: int) -> str:
    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"type {kind}"
