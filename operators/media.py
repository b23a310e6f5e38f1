"""DecodeVideo and DecodeAudio: encoded bytes or a file's path to frames and samples (torchcodec, FFmpeg)."""

from __future__ import annotations

import os
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Literal, final

import torch

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator
from pipegraph.errors import DataError, DecodeError, GraphError, PipegraphError, extra_module, shown
from pipegraph.integers import integer
from pipegraph.randomness import generator

Begin = Literal["first", "middle", "random"]
Range = tuple[float, float] | None
Seconds = Range | str

VIDEO_FIELDS = ("video", "mp4", "webm", "mkv", "mov", "avi", "bytes", "path")
AUDIO_FIELDS = ("audio", "wav", "flac", "mp3", "ogg", "opus", "m4a", "bytes", "path")
"""Where encoded bytes, or the path of a file, are looked for, in this order."""


def _decoders(what: str) -> Any:
    try:
        return extra_module("torchcodec.decoders", what, f"decoding {what}", "torchcodec")
    except (OSError, RuntimeError) as error:
        raise PipegraphError(
            f"decoding {what} needs FFmpeg's shared libraries (4 to 8), and a torchcodec made for this torch; "
            "torchcodec is installed and found none that fit. Debian and Ubuntu: apt-get install ffmpeg"
        ) from error


def _check_seconds(seconds: Any, who: str) -> None:
    if seconds is None or (isinstance(seconds, str) and seconds):
        return
    if (
        not isinstance(seconds, tuple | list)
        or len(seconds) != 2
        or any(isinstance(each, bool) or not isinstance(each, int | float) for each in seconds)
        or not 0 <= seconds[0] < seconds[1]
    ):
        raise GraphError(
            f"{who}: seconds must be (from, to) with 0 <= from < to, or the name of a field with these, "
            f"got {shown(seconds)}"
        )


class _Decode(Operator):
    """What both share: where the input lies, the range of time, where a clip begins."""

    needs = "sample"
    what: str
    fields: tuple[str, ...]
    own: tuple[str, ...]
    """The parameters that the other one does not have."""

    def __init__(self, field: str | None, output: str, seconds: Seconds, begin: Begin) -> None:
        who = type(self).__name__
        _check_seconds(seconds, who)
        if begin not in ("first", "middle", "random"):
            raise GraphError(f'{who}: begin must be "first", "middle" or "random", got {begin!r}')
        for name, value in (("field", field), ("output", output)):
            if (value is not None or name == "output") and (not isinstance(value, str) or not value):
                raise GraphError(f"{who}: {name} must be the name of a field, got {shown(value)}")
        self.field, self.output, self.seconds, self.begin = field, output, seconds, begin
        self.depends_on = "item|random" if begin == "random" else "item"
        self._context = Context("")
        self._open: Any = None

    def open(self, context: Context) -> None:
        self._context = context
        self._open = _decoders(self.what)

    def config(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*self.own, "begin", "seconds", "field", "output")}

    @abstractmethod
    def decode(self, source: Any, seconds: Range, first: Callable[[int, int], int]) -> dict[str, Any]:
        """The fields to add.

        Args:
            first: of how many there are and how many are wanted, with which to begin.
        """

    def process(self, chunk: Chunk) -> Chunk:
        data, who = chunk.data, type(self).__name__
        name, source = None, data
        if isinstance(data, Mapping):
            names = self.fields if self.field is None else (self.field,)
            name = next((each for each in names if each in data), None)
            if name is None:
                raise DataError(f"{who}: no field {' or '.join(names)} in {', '.join(map(str, data))}")
            source = data[name]
        if isinstance(source, bytearray | memoryview):
            source = bytes(source)
        if not isinstance(source, bytes | str | os.PathLike):
            raise DataError(
                f"{who}: encoded bytes or the path of a file are needed, got {type(source).__name__}; put "
                "it before Batch"
            )
        if not isinstance(source, bytes) and os.path.exists(source) and not os.path.isfile(source):
            raise DataError(f"{who}: {os.fspath(source)!r} is no regular file (a folder, a pipe or a device)")
        made = self._decoded(source, self._range(data, who), chunk)
        kept = {key: value for key, value in data.items() if key != name or name == "path"} if name else {}
        taken = next((field for field in made if field in kept), None)
        if taken is not None:
            raise DataError(f"{who}: there is a field {taken!r} already; choose another name with output=")
        chunk.keys = chunk.own_keys
        chunk.data = {**kept, **made}
        return chunk

    def _range(self, data: Any, who: str) -> Range:
        if not isinstance(self.seconds, str):
            return self.seconds
        if not isinstance(data, Mapping) or self.seconds not in data:
            raise DataError(f"{who}: no field {self.seconds!r} with (from, to) in seconds")
        try:
            start, stop = (float(each) for each in data[self.seconds])
        except (TypeError, ValueError):
            start, stop = 0.0, 0.0
        if not 0 <= start < stop:
            raise DataError(
                f"{who}: field {self.seconds!r} must be (from, to) in seconds with 0 <= from < to, got "
                f"{data[self.seconds]!r}"
            )
        return start, stop

    def _decoded(self, source: Any, seconds: Range, chunk: Chunk) -> dict[str, Any]:
        def first(there: int, wanted: int) -> int:
            spare = max(0, there - wanted)
            if self.begin == "first":
                return 0
            if self.begin == "middle":
                return spare // 2
            context = self._context
            drawn = generator(context.seed, chunk.epoch, chunk.lineages[0], context.stage)
            return int(drawn.integers(spare + 1))

        try:
            return self.decode(source, seconds, first)
        except DataError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            of = f"{len(source)} bytes" if isinstance(source, bytes) else f"the file {os.fspath(source)!r}"
            raise DecodeError(f"{of} cannot be decoded as {self.what}: {error}") from error


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
        seconds: only frames shown in this range of time, (from, to): a pair, or the name of a field with one for each
            sample.
        field: of the encoded bytes, or of a file's path; by default the first of ``video, mp4, webm, mkv, mov, avi,
            bytes, path`` that is there. It is left out, but for ``path``.
        output: the field of the frames.

    Raises:
        DecodeError: it is not a video, is broken, or has no frame in the range.
        MissingExtraError: torchcodec is not installed: the message has its install line.
    """

    name = "decodevideo"
    what, fields, own = "video", VIDEO_FIELDS, ("frames", "stride")

    def __init__(
        self,
        frames: int | None = None,
        stride: int = 1,
        begin: Begin = "first",
        seconds: Seconds = None,
        field: str | None = None,
        output: str = "video",
    ) -> None:
        super().__init__(field, output, seconds, begin)
        self.frames = None if frames is None else integer(frames, "DecodeVideo: frames")
        self.stride = integer(stride, "DecodeVideo: stride")

    def decode(self, source: Any, seconds: Range, first: Callable[[int, int], int]) -> dict[str, Any]:
        decoder = self._open.VideoDecoder(source, num_ffmpeg_threads=1)
        low, high = 0, len(decoder)
        if seconds is not None:
            low, high = _shown(decoder, *seconds)
        if low >= high:
            when = "" if seconds is None else f" between {seconds[0]} and {seconds[1]} s"
            raise DecodeError(f"the video has no frame{when}")
        numbers = list(range(low, high, self.stride))
        if self.frames is not None:
            span = (self.frames - 1) * self.stride + 1
            start = low + first(high - low, span)
            numbers = [start + step * self.stride for step in range(self.frames)]
            last = max(number for number in numbers if number < high)
            numbers = [min(number, last) for number in numbers]
        found = decoder.get_frames_at(numbers)
        return {self.output: found.data, f"{self.output}_seconds": found.pts_seconds}


def _shown(decoder: Any, start: float, stop: float) -> tuple[int, int]:
    """The numbers of the frames shown from ``start`` up to ``stop``."""
    begins, ends = decoder.metadata.begin_stream_seconds, decoder.metadata.end_stream_seconds
    start, stop = max(start, begins), min(stop, ends)
    if start >= stop:
        return 0, 0

    def begin(number: int) -> float:
        return float(decoder.get_frame_at(number).pts_seconds)

    # Frames need not be of equal length.
    numbers = range(len(decoder))
    return max(0, bisect_right(numbers, start, key=begin) - 1), bisect_left(numbers, stop, key=begin)


@final
class DecodeAudio(_Decode):
    """Audio samples, on samples: float32 (channels, T) between -1 and 1 as ``"audio"``, their rate as
    ``"audio_rate"`` and the time of the first, in seconds, as ``"audio_seconds"``.

    Args:
        samples: how many (per channel); by default all. Where there are fewer, zeros follow, and ``"audio_length"``
            says how many there are; the whole range is decoded first.
        rate: resampled to this many per second; by default as it is.
        channels: number to mix to; by default as they are.
        begin: with the ``"first"`` sample; so that the clip lies in the ``"middle"``; or at ``"random"``, a draw of the
            sample's own.
        seconds: only this range of time, (from, to): a pair, or the name of a field with one for each sample.
        field: of the encoded bytes, or of a file's path; by default the first of ``audio, wav, flac, mp3, ogg, opus,
            m4a, bytes, path`` that is there. It is left out, but for ``path``.
        output: the field of the samples, and the beginning of the other fields' names.

    Raises:
        DecodeError: it is not audio, is broken, or has nothing in the range.
        MissingExtraError: torchcodec is not installed: the message has its install line.
    """

    name = "decodeaudio"
    what, fields, own = "audio", AUDIO_FIELDS, ("samples", "rate", "channels")

    def __init__(
        self,
        samples: int | None = None,
        rate: int | None = None,
        channels: int | None = None,
        begin: Begin = "first",
        seconds: Seconds = None,
        field: str | None = None,
        output: str = "audio",
    ) -> None:
        super().__init__(field, output, seconds, begin)
        self.samples = None if samples is None else integer(samples, "DecodeAudio: samples")
        self.rate = None if rate is None else integer(rate, "DecodeAudio: rate")
        self.channels = None if channels is None else integer(channels, "DecodeAudio: channels")

    def decode(self, source: Any, seconds: Range, first: Callable[[int, int], int]) -> dict[str, Any]:
        decoder = self._open.AudioDecoder(source, sample_rate=self.rate, num_channels=self.channels)
        if seconds is None:
            found = decoder.get_all_samples()
        else:
            found = decoder.get_samples_played_in_range(*seconds)
        data, begins, rate = found.data, float(found.pts_seconds), int(found.sample_rate)
        there = data.shape[1]
        if not there:
            raise DecodeError("the audio has no sample in the range")
        made: dict[str, Any] = {}
        if self.samples is not None:
            start = first(there, self.samples)
            data = data[:, start : start + self.samples].clone()  # else the whole of it would be kept
            begins += start / rate
            made[f"{self.output}_length"] = data.shape[1]
            data = torch.nn.functional.pad(data, (0, self.samples - data.shape[1]))
        return {self.output: data, f"{self.output}_rate": rate, f"{self.output}_seconds": begins, **made}
