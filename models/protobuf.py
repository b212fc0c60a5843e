"""As much of the protobuf wire format as a sentencepiece model needs (protobuf.dev, "Encoding")."""

import struct
from collections.abc import Iterator


def field(number: int, value: int | float | str | bytes) -> bytes:
    """A field as it is written: varint, float32 or length-delimited bytes."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers are written in two's complement
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, content) of each field of a message whose fields are messages themselves."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        size, at = read_varint(data, at)
        yield key >> 3, data[at : at + size]
        at += size


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at a place, and the place after it."""
    value = shift = 0
    while data[at] > 127:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1
