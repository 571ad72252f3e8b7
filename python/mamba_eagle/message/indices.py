"""Lists of token ids and of slots: 4 bytes each, in memory and on the wire."""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

# Behaves like a list[int], except that it equals no list. A numpy array over its buffer is free,
# but the array cannot grow while one exists.
if TYPE_CHECKING:
    Indices: TypeAlias = array[int]
else:
    Indices = array  # generic from Python 3.12 on

TYPECODE = "i"  # C int: 32 bits wherever torch runs


def indices(values: Iterable[int] | bytes = ()) -> Indices:
    """A new array of these values; of bytes: as they are in memory."""
    return array(TYPECODE, values)


def to_wire(value: Any) -> memoryview:
    """For msgspec: ``Indices`` travel as their bytes. The other end is on the same machine."""
    if isinstance(value, array) and value.typecode == TYPECODE:
        return memoryview(value)
    raise TypeError(f"a message cannot hold a {type(value).__name__}: {str(value)[:200]}")


def from_wire(kind: Any, value: Any) -> Indices:
    """Undoes ``to_wire``."""
    if kind is array and isinstance(value, bytes):
        return indices(value)
    raise TypeError(f"{kind} cannot be read from a {type(value).__name__}: {str(value)[:200]}")
