"""DecodeVideo and DecodeAudio: encoded bytes or a file's path to frames and samples (torchcodec, FFmpeg)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, final

import torch

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator
from pipegraph.errors import DataError, DecodeError, GraphError, PipegraphError, extra_module, shown
from pipegraph.integers import integer
from pipegraph.randomness import generator

Begin = Literal["first", "middle", "random"]


def _first(part: float, there: int, wanted: int) -> int:
    """With which of those that are there a clip begins."""
    return int(part * (max(0, there - wanted) + 1))


class _Decode(Operator):
    """What both share: where the input lies, and where a clip begins."""

    needs = "sample"
    what: str
    fields: tuple[str, ...]
    """Where encoded bytes, or the path of a file, are looked for, in this order."""

    def __init__(self, begin: Begin, field: str | None) -> None:
        if begin not in ("first", "middle", "random"):
            raise GraphError(f'{self.name}: begin must be "first", "middle" or "random", got {shown(begin)}')
        self.begin, self.field = begin, field
        self.depends_on = "item|random" if begin == "random" else "item"

    def open(self, context: Context) -> None:
        self._context = context
        try:
            self._open = extra_module("torchcodec.decoders", self.what, f"decoding {self.what}", "torchcodec")
        except (OSError, RuntimeError) as error:
            raise PipegraphError(
                f"decoding {self.what} needs FFmpeg's shared libraries (4 to 8), and a torchcodec made for this torch; "
                "torchcodec is installed and found none that fit. Debian and Ubuntu: apt-get install ffmpeg"
            ) from error

    @abstractmethod
    def decode(self, source: Any, part: float) -> dict[str, Any]:
        """The fields to add; a clip begins behind this part of what it leaves out."""

    def process(self, chunk: Chunk) -> Chunk:
        data, name, source = chunk.data, None, chunk.data
        if isinstance(data, Mapping):
            names = self.fields if self.field is None else (self.field,)
            name = next((each for each in names if each in data), None)
            if name is None:
                raise DataError(f"{self.name}: no field {' or '.join(names)} in {', '.join(map(str, data))}")
            source = data[name]
        context = self._context
        drawn = generator(context.seed, chunk.epoch, chunk.lineages[0], context.stage).random()
        part = {"first": 0.0, "middle": 0.5, "random": drawn}[self.begin]
        try:
            made = self.decode(bytes(source) if isinstance(source, bytearray | memoryview) else source, part)
        except (RuntimeError, ValueError, IndexError) as error:
            of = f"{len(source)} bytes" if isinstance(source, bytes) else shown(source)
            raise DecodeError(f"{of} cannot be decoded as {self.what}: {error}") from error
        kept = {key: value for key, value in data.items() if key != name or name == "path"} if name else {}
        chunk.keys = chunk.own_keys
        chunk.data = {**kept, **made}
        return chunk


@final
class DecodeVideo(_Decode):
    """A video's frames, on samples: uint8 (T, C, H, W) as ``"video"``, and their times in seconds, float64 (T,), as
    ``"video_seconds"``.

    Frames are counted as they are shown. Each worker decodes in one thread of FFmpeg; give the stage several.

    Args:
        frames: how many; by default all. Where there are fewer the last one is repeated, with its time.
        stride: the step between frames that are taken: 2 takes every other one.
        begin: with the ``"first"`` frame; so that the clip lies in the ``"middle"``; or at ``"random"``, a draw of the
            sample's own.
        field: of the encoded bytes, or of a file's path; by default the first of ``video, mp4, webm, mkv, mov, avi,
            bytes, path`` that is there. It is left out, but for ``path``.

    Raises:
        DecodeError: it is not a video, is broken, or has no frame.
        MissingExtraError: torchcodec is not installed: the message has its install line.
    """

    name = "decodevideo"
    what, fields = "video", ("video", "mp4", "webm", "mkv", "mov", "avi", "bytes", "path")

    def __init__(
        self,
        frames: int | None = None,
        stride: int = 1,
        begin: Begin = "first",
        field: str | None = None,
    ) -> None:
        super().__init__(begin, field)
        self.frames = None if frames is None else integer(frames, "DecodeVideo: frames")
        self.stride = integer(stride, "DecodeVideo: stride")

    def decode(self, source: Any, part: float) -> dict[str, Any]:
        decoder = self._open.VideoDecoder(source, num_ffmpeg_threads=1)
        count = len(decoder)
        if not count:
            raise ValueError("it has no frame")
        numbers = list(range(0, count, self.stride))
        if self.frames is not None:
            begin = _first(part, count, (self.frames - 1) * self.stride + 1)
            numbers = list(range(begin, count, self.stride))[: self.frames]
            numbers += numbers[-1:] * (self.frames - len(numbers))
        found = decoder.get_frames_at(numbers)
        return {"video": found.data, "video_seconds": found.pts_seconds}


@final
class DecodeAudio(_Decode):
    """Audio samples, on samples: float32 (channels, T) between -1 and 1 as ``"audio"``, their rate as
    ``"audio_rate"`` and the time of the first, in seconds, as ``"audio_seconds"``.

    Args:
        samples: how many (per channel); by default all. Where there are fewer, zeros follow, and ``"audio_length"``
            says how many there are; the whole recording is decoded first.
        rate: resampled to this many per second; by default as it is.
        channels: number to mix to; by default as they are.
        begin: with the ``"first"`` sample; so that the clip lies in the ``"middle"``; or at ``"random"``, a draw of the
            sample's own.
        field: of the encoded bytes, or of a file's path; by default the first of ``audio, wav, flac, mp3, ogg, opus,
            m4a, bytes, path`` that is there. It is left out, but for ``path``.

    Raises:
        DecodeError: it is not audio, is broken, or has no sample.
        MissingExtraError: torchcodec is not installed: the message has its install line.
    """

    name = "decodeaudio"
    what, fields = "audio", ("audio", "wav", "flac", "mp3", "ogg", "opus", "m4a", "bytes", "path")

    def __init__(
        self,
        samples: int | None = None,
        rate: int | None = None,
        channels: int | None = None,
        begin: Begin = "first",
        field: str | None = None,
    ) -> None:
        super().__init__(begin, field)
        self.samples = None if samples is None else integer(samples, "DecodeAudio: samples")
        self.rate = None if rate is None else integer(rate, "DecodeAudio: rate")
        self.channels = None if channels is None else integer(channels, "DecodeAudio: channels")

    def decode(self, source: Any, part: float) -> dict[str, Any]:
        decoder = self._open.AudioDecoder(source, sample_rate=self.rate, num_channels=self.channels)
        found = decoder.get_all_samples()
        data, begins, rate = found.data, float(found.pts_seconds), int(found.sample_rate)
        if not data.shape[1]:
            raise ValueError("it has no sample")
        made: dict[str, Any] = {}
        if self.samples is not None:
            start = _first(part, data.shape[1], self.samples)
            data = data[:, start : start + self.samples].clone()  # else the whole of it would be kept
            begins += start / rate
            made["audio_length"] = data.shape[1]
            data = torch.nn.functional.pad(data, (0, self.samples - data.shape[1]))
        return {"audio": data, "audio_rate": rate, "audio_seconds": begins, **made}
