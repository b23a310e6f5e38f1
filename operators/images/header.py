"""What an encoded image is, from its first bytes: format, size, orientation; no pixel is decoded.

JPEG, PNG and WebP are read here in microseconds; anything else that Pillow
opens, and every oddity, is asked of Pillow, so that the answer is Pillow's.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from pipegraph.errors import DecodeError
from pipegraph.operators.images.orientation import orientation_of, swaps_sides

MAX_PIXELS = 89_478_485
"""Pixels of the largest image that is decoded: Pillow's own warning threshold (256 MiB as RGB)."""


class Header(NamedTuple):
    """What the first bytes of an encoded image say.

    Attributes:
        format: Pillow's name: ``"JPEG"``, ``"PNG"``, ``"WEBP"``, ``"GIF"`` ...
        width, height: in pixels as stored, before the orientation.
        orientation: EXIF value 1 to 8; 1 where there is none.
        mode: ``"L"``, ``"RGB"``, or whatever else Pillow would call the image's mode:
            ``"P"``, ``"RGBA"``, ``"CMYK"``, ``"I;16"``, ``"1"`` ...
        bits: per channel as stored.
        plain: whether the image is greyscale or colour of 8 bits without palette
            and alpha: what every backend decodes by itself.
        complete: whether the end marker is there; without it Pillow judges the file.
        rows_at: where the number of rows stands in a JPEG whose rows are decoded one
            after the other (baseline, one scan); 0 in all others.
    """

    format: str
    width: int
    height: int
    orientation: int
    mode: str
    bits: int
    plain: bool
    complete: bool = True
    rows_at: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the oriented image."""
        if swaps_sides(self.orientation):
            return self.width, self.height
        return self.height, self.width


def probe(data: bytes | bytearray | memoryview) -> Header:
    """Read an image's header."""
    if not isinstance(data, bytes):
        data = _bytes_of(data)
    if not data:
        raise DecodeError("the image is empty: 0 bytes")
    try:
        if data.startswith(b"\xff\xd8\xff"):
            header = _jpeg(data)
        elif data.startswith(b"\x89PNG\r\n\x1a\n"):
            header = _png(data)
        elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            header = _webp(data)
        else:
            header = None
    except (struct.error, IndexError):
        raise DecodeError(f"the image ends inside its header: {len(data)} bytes") from None
    if header is None:
        from pipegraph.operators.images.pillow import probe_with_pillow

        header = probe_with_pillow(data)
    check_size(header.width, header.height)
    return header


def _bytes_of(data: Any) -> bytes:
    try:
        view = memoryview(data)
    except TypeError:
        hint = "; for a path put Load() before" if isinstance(data, str) else ""
        raise DecodeError(f"an image's encoded bytes are needed, got {type(data).__name__}{hint}") from None
    if view.ndim > 1:
        raise DecodeError(f"an image's encoded bytes are needed, got an array of shape {view.shape}")
    return bytes(view)


def check_size(width: int, height: int) -> None:
    """Refuse sizes that nothing sensible has, before memory is taken for them."""
    if width < 1 or height < 1:
        raise DecodeError(f"the image's header says {width}x{height} pixels")
    if width * height > MAX_PIXELS:
        raise DecodeError(
            f"the image's header says {width}x{height} = {width * height} pixels, more than the limit of "
            f"{MAX_PIXELS}: a decompression bomb, or an image to be cut into tiles first"
        )


# Start-of-frame markers. The backends decode the first three: baseline, extended, progressive Huffman.
_FRAMES = {0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
_segment = struct.Struct(">BBH").unpack_from
_frame = struct.Struct(">BHHB").unpack_from


def _jpeg(data: bytes) -> Header | None:
    position, exif_block, xmp = 2, b"", b""
    bits = width = height = channels = rows_at = 0
    known = True
    while True:
        lead, marker, length = _segment(data, position)
        if lead != 0xFF or marker == 0xFF:  # garbage or fill bytes between segments: Pillow's to judge
            return None
        body = position + 4
        if marker == 0xDA:
            if data[body] != channels:  # one scan per component
                rows_at = 0
            break
        if marker == 0xE1:
            if data.startswith(b"Exif\0\0", body):
                # Several blocks are one that was split (Pillow joins them too).
                exif_block += data[body + 6 : position + 2 + length]
            elif data.startswith(b"http://ns.adobe.com/xap/1.0/\0", body):
                xmp = data[body + 29 : position + 2 + length]
        elif marker in _FRAMES:
            bits, height, width, channels = _frame(data, body)
            rows_at = body + 1 if marker <= 0xC1 else 0
            known = known and marker <= 0xC2
        position += 2 + length
    if not channels or not height:
        return None
    mode = {1: "L", 3: "RGB", 4: "CMYK"}.get(channels, "?")
    orientation = orientation_of(exif_block, xmp) if exif_block or xmp else 1
    plain = known and bits == 8 and channels in (1, 3)
    complete = data.rfind(b"\xff\xd9", position) >= 0  # no other marker of pixels looks like this one
    return Header("JPEG", width, height, orientation, mode, bits, plain, complete, rows_at)


_PNG_MODES = {0: "L", 2: "RGB", 3: "P", 4: "LA", 6: "RGBA"}
_chunk = struct.Struct(">I4s").unpack_from
_ihdr = struct.Struct(">IIBB").unpack_from


def _png(data: bytes) -> Header | None:
    length, kind = _chunk(data, 8)
    if kind != b"IHDR":
        return None
    width, height, bits, colour = _ihdr(data, 16)
    mode, exif_block = _PNG_MODES.get(colour, "?"), b""
    transparent = complete = False
    position, end = 8 + 12 + length, len(data) - 8
    while position <= end:
        length, kind = _chunk(data, position)
        if kind == b"eXIf":  # may come after the pixels
            exif_block = data[position + 8 : position + 8 + length]
        elif kind == b"tRNS":
            transparent = True
        elif kind in (b"acTL", b"tEXt", b"zTXt", b"iTXt") and _hides_orientation(
            kind, data[position + 8 : position + 40]
        ):
            return None
        elif kind == b"IEND":
            complete = True
            break
        position += 12 + length
    if mode == "L" and bits == 16:
        mode = "I;16"
    elif mode == "L" and bits == 1:
        mode = "1"
    plain = bits == 8 and mode in ("L", "RGB") and not transparent
    return Header("PNG", width, height, orientation_of(exif_block, b""), mode, bits, plain, complete)


def _hides_orientation(kind: bytes, start: bytes) -> bool:
    """Whether a chunk may change what Pillow shows: animations, EXIF and XMP in text chunks."""
    return kind == b"acTL" or start.startswith((b"Raw profile type exif\0", b"XML:com.adobe.xmp\0"))


def _webp(data: bytes) -> Header | None:
    kind = data[12:16]
    complete = len(data) >= 8 + int.from_bytes(data[4:8], "little")
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            return None
        width, height = struct.unpack_from("<HH", data, 26)
        return Header("WEBP", width & 0x3FFF, height & 0x3FFF, 1, "RGB", 8, True, complete)
    if kind == b"VP8L":
        (packed,) = struct.unpack_from("<I", data, 21)
        alpha = bool(packed >> 28 & 1)
        width, height = (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
        return Header("WEBP", width, height, 1, "RGBA" if alpha else "RGB", 8, not alpha, complete)
    if kind != b"VP8X":
        return None
    flags = data[20]
    if flags & 0x02:  # an animation
        return None
    width = int.from_bytes(data[24:27], "little") + 1
    height = int.from_bytes(data[27:30], "little") + 1
    exif_block = xmp = b""
    position, end = 30, len(data) - 8
    while position < end and flags & 0x0C:
        kind, length = struct.unpack_from("<4sI", data, position)
        if kind == b"EXIF":
            exif_block = data[position + 8 : position + 8 + length]
        elif kind == b"XMP ":
            xmp = data[position + 8 : position + 8 + length]
        position += 8 + length + (length & 1)
    alpha = bool(flags & 0x10)
    orientation = orientation_of(exif_block, xmp)
    return Header("WEBP", width, height, orientation, "RGBA" if alpha else "RGB", 8, not alpha, complete)
