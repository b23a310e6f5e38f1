"""``DecodeVideo`` and ``DecodeAudio``: which frames and samples, exact resume, hostile files."""

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, DecodeError
from pipegraph.testing import assert_resumes_exactly, assert_same_everywhere

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module")
def ffmpeg():
    """Asked for by the tests that need it: the import takes seconds, and not every test process runs these."""
    try:
        import torchcodec  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        pytest.skip("torchcodec finds no FFmpeg libraries here: apt-get install ffmpeg")


needs_ffmpeg = pytest.mark.usefixtures("ffmpeg")


@pytest.fixture(scope="module")
def video(ffmpeg):
    """20 frames at 10 per second, each of one grey level: 12 times its number."""
    from torchcodec.encoders import VideoEncoder

    levels = torch.arange(20, dtype=torch.uint8)[:, None, None, None] * 12
    return bytes(
        VideoEncoder(levels.expand(20, 3, 48, 64).contiguous(), frame_rate=10).to_tensor("mp4").numpy()
    )


@pytest.fixture(scope="module")
def audio(ffmpeg):
    """One second of a ramp from 0 to 0.5, at 8,000 per second."""
    from torchcodec.encoders import AudioEncoder

    ramp = torch.linspace(0, 0.5, 8000)[None]
    return bytes(AudioEncoder(ramp, sample_rate=8000).to_tensor("wav").numpy())


def decoded(operator, *samples, seed=5):
    graph = pg.Graph("g", seed=seed)
    graph.add(ops.FromSequence(list(samples))).then(operator, name="decode")
    with graph.loader() as loader:
        return list(loader)


def numbers(found):
    return [round(level / 12) for level in found["video"][:, 0, 0, 0].tolist()]


# -- video -------------------------------------------------------------------------------------------


@needs_ffmpeg
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, list(range(20))),
        ({"stride": 6}, [0, 6, 12, 18]),
        ({"frames": 4}, [0, 1, 2, 3]),
        ({"frames": 4, "stride": 2, "begin": "middle"}, [7, 9, 11, 13]),
        ({"frames": 4, "stride": 8}, [0, 8, 16, 16]),
    ],
)
def test_the_frames_that_were_asked_for_come_with_their_times(video, options, expected):
    (found,) = decoded(ops.DecodeVideo(**options), {"mp4": video, "label": 3})
    assert numbers(found) == expected and found["video"].shape == (len(expected), 3, 48, 64)
    assert found["video"].dtype == torch.uint8 and found["video_seconds"].dtype == torch.float64
    assert found["video_seconds"].tolist() == pytest.approx([n / 10 for n in expected])
    assert set(found) == {"video", "video_seconds", "label"}


@needs_ffmpeg
def test_random_clips_are_the_samples_own_and_resume_exactly(video):
    def make():
        graph = pg.Graph("g", seed=5)
        source = graph.add(ops.FromSequence([{"mp4": video} for _ in range(6)]))
        source.then(ops.DecodeVideo(3, stride=2, begin="random"), workers=2).then(ops.Batch(2))
        return graph

    with make().loader() as loader:
        begins = [int(t * 10 + 0.5) for batch in loader for t in batch["video_seconds"][:, 0].tolist()]
    assert len(set(begins)) > 1 and all(0 <= b <= 15 for b in begins)
    assert_resumes_exactly(make)
    assert_same_everywhere(make, workers=(2,))


@needs_ffmpeg
def test_hostile_videos_are_named(video, audio):
    for data, message in [
        (b"", "0 bytes cannot be decoded as video"),
        (b"no video", "8 bytes cannot be decoded as video"),
        (video[: len(video) // 2], "cannot be decoded as video"),
        (audio, "cannot be decoded as video"),
    ]:
        with pytest.raises(DecodeError, match=message) as caught:
            decoded(ops.DecodeVideo(), {"mp4": data})
        assert any("stage 'decode'" in note for note in caught.value.__notes__)
    with pytest.raises(DataError, match="no field video or mp4"):
        decoded(ops.DecodeVideo(), {"key": "a"})


# -- audio -------------------------------------------------------------------------------------------


@needs_ffmpeg
def test_the_samples_that_were_asked_for(audio):
    (found,) = decoded(ops.DecodeAudio(), {"wav": audio, "text": "a"})
    assert found["audio"].shape == (1, 8000) and found["audio"].dtype == torch.float32
    assert (found["audio_rate"], found["audio_seconds"], found["text"]) == (8000, 0.0, "a")
    (found,) = decoded(ops.DecodeAudio(rate=4000, channels=2), {"wav": audio})
    assert found["audio"].shape == (2, 4000) and found["audio_rate"] == 4000


# -- without files -----------------------------------------------------------------------------------
