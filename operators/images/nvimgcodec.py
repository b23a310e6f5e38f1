"""nvImageCodec on the CPU as a region decoder: inverse DCT and colour conversion of the region only.

JPEG at full scale; it offers no reduced scale. Each thread has a decoder of its
own that decodes on that thread, and one image whose memory is used again.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipegraph import concurrency
from pipegraph.errors import MissingExtraError
from pipegraph.forks import lock_free_after_fork
from pipegraph.operators.images.crop import Region
from pipegraph.operators.images.header import Buffer, Header, ImageHWC
from pipegraph.operators.images.regions import KEPT_NBYTES

# What the library says on standard error where its GPU libraries are missing, which is no fault here.
_NOTICE = re.compile(
    rb"Failed to load nv\w+ library!|Note: If using nvImageCodec's Python distribution|"
    rb"Failed to load nv\w+ library or retrieve version"
)
_loading = lock_free_after_fork()


def load(purpose: str = "backend='nvimgcodec'") -> Any:
    """Import nvImageCodec without its notices about missing GPU libraries."""
    with _loading:
        if "nvidia.nvimgcodec" in sys.modules:
            return sys.modules["nvidia.nvimgcodec"]
        try:
            with _without_notices():
                from nvidia import nvimgcodec

                cpu_decoder(nvimgcodec)
        except ImportError as error:
            package = "nvidia-nvimgcodec-cu13"
            raise MissingExtraError.of(error, "nvidia.nvimgcodec", "nvimgcodec", purpose, package) from error
        return nvimgcodec


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """Native code writes to descriptor 2: a file takes its place, and all but the notices is passed on."""
    try:
        kept = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    with tempfile.TemporaryFile() as caught:
        try:
            os.dup2(caught.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught:
                if not _NOTICE.search(line):
                    os.write(2, line)


def cpu_decoder(nvimgcodec: Any) -> Any:
    """A decoder that decodes on the calling thread."""
    return nvimgcodec.Decoder(
        device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
        backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
        max_num_cpu_threads=1,
    )


def parameters(nvimgcodec: Any) -> dict[int, Any]:
    """How to decode 8 bits as stored, by the number of channels."""
    kinds = ((1, nvimgcodec.ColorSpec.GRAY), (3, nvimgcodec.ColorSpec.SRGB))
    return {
        channels: nvimgcodec.DecodeParams(
            color_spec=kind, apply_exif_orientation=False, allow_any_depth=False
        )
        for channels, kind in kinds
    }


class _PerThread(concurrency.local):
    decoder: Any = None
    image: Any = None


class NvimgcodecRegions:
    """See ``RegionDecoder``. JPEG at factor 1 only."""

    def __init__(self) -> None:
        self._nv = load()
        self._parameters = parameters(self._nv)
        self._mine = _PerThread()

    def decode(
        self, data: Buffer, header: Header, region: Region, factor: int, channels: int
    ) -> ImageHWC | None:
        if factor != 1:
            return None
        nv, mine = self._nv, self._mine
        if mine.decoder is None:
            mine.decoder = cpu_decoder(nv)
        top, left, height, width = region
        source = data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)
        stream = nv.CodeStream(source).get_sub_code_stream(
            0, nv.Region(top, left, top + height, left + width)
        )
        image = mine.decoder.decode(stream, params=self._parameters[channels], image=mine.image)
        mine.image = image if image is not None and height * width * channels <= KEPT_NBYTES else None
        if image is None:
            return None
        pixels: ImageHWC = np.asarray(image)
        return pixels if pixels.shape == (height, width, channels) else None
