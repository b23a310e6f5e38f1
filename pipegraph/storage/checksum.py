"""CRC-32C of byte strings, through google-crc32c, and of what such strings make together."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Final

from pipegraph.errors import MissingExtraError

from .files import ShardFile

# Large enough that calls do not count, small enough to stay in a core's cache.
_PIECE_NBYTES: Final = 1 << 20


@cache
def crc32c_extend() -> Callable[[int, bytes], int]:
    """``extend(crc, data) -> crc``.

    Raises:
        MissingExtraError: google-crc32c is not installed.
    """
    try:
        extend: Callable[[int, bytes], int] = importlib.import_module("google_crc32c").extend
    except ImportError as error:
        raise MissingExtraError("google_crc32c", "shards", "checking shards") from error
    return extend


def file_crc32c(file: ShardFile, offset: int, nbytes: int, crc: int = 0) -> int:
    """The checksum of a range, continued from `crc`."""
    extend = crc32c_extend()
    for at in range(offset, offset + nbytes, _PIECE_NBYTES):
        crc = extend(crc, file.read_at(at, min(_PIECE_NBYTES, offset + nbytes - at)))
    return crc


def combine(first: int, second: int, nbytes: int) -> int:
    """The checksum of two strings laid end to end, from that of each.

    By the method of zlib's ``crc32_combine``: the first one's is multiplied by x to the power of the bits behind it,
    modulo the polynomial.

    Args:
        nbytes: length of the second string.
    """
    return _multiply(_shift(nbytes), first) ^ second


# Castagnoli's polynomial, lowest power in the highest bit.
_POLYNOMIAL: Final = 0x82F63B78
_ONE: Final = 1 << 31


def _multiply(a: int, b: int) -> int:
    """Of two polynomials, modulo the one above."""
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


# Pieces of a download are of one size, and the last of another.
@lru_cache(maxsize=64)
def _shift(nbytes: int) -> int:
    """x to the power of so many bytes' bits."""
    power, square = _ONE, 1 << 23  # x**0, x**8
    while nbytes:
        if nbytes & 1:
            power = _multiply(square, power)
        square, nbytes = _multiply(square, square), nbytes >> 1
    return power
