"""Audio classification: clips cut at random from recordings of any length, resampled, and their spectrograms.

Reads a folder with a folder of recordings per class. Needs FFmpeg's libraries and torchcodec.

python examples/audio.py --data recordings
python examples/audio.py --smoke
"""

import argparse
import math
import tempfile
import wave
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import pipegraph as pg
from pipegraph import operators as ops


def clip(sample, rng, rate):
    """One second of a recording, from a random place; zeros follow where there is less."""
    from torchcodec.decoders import AudioDecoder

    found = AudioDecoder(sample["path"], sample_rate=rate, num_channels=1).get_all_samples().data
    start = int(rng.integers(max(0, found.shape[1] - rate) + 1))
    audio = found[:, start : start + rate]
    return {"audio": F.pad(audio, (0, rate - audio.shape[1])), "label": sample["label"]}


def pipeline(folder, rate, batch_size, device):
    graph = pg.Graph("audio", seed=7)
    files = graph.add(ops.ListFiles(folder, pattern="*.*", shuffle=True), name="list")
    clips = files.then(partial(clip, rate=rate), name="decode", workers=4, on_error=pg.Skip(0.01))
    batches = clips.then(ops.Batch(batch_size, drop_last=True), name="batch")
    batches.then(ops.Pin(), name="pin").then(ops.CopyToDevice(device), name="copy")
    return graph


def spectrogram(audio):
    """Log power, (N, 1, frequencies, frames), of clips (N, 1, T)."""
    window = torch.hann_window(400, device=audio.device)
    found = torch.stft(audio[:, 0], 400, 160, window=window, return_complex=True)
    return found.abs().square().add(1e-6).log().unsqueeze(1)


def network(classes):
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, 2, 2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d((8, 1)), nn.Flatten(), nn.Linear(256, classes)),
    )


def main(arguments):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = network(arguments.classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    graph = pipeline(arguments.data, arguments.rate, arguments.batch_size, device)
    with graph.loader(epochs=arguments.epochs) as loader:
        for epoch in range(arguments.epochs):
            correct = seen = 0
            for batch in loader:  # audio: float32 (N, 1, rate), label: int64 (N,)
                found = model(spectrogram(batch["audio"]))
                loss = F.cross_entropy(found, batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                correct += int((found.argmax(1) == batch["label"]).sum())
                seen += len(batch["label"])
            print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {correct / seen:.3f}")
        print(loader.profile())


def write_recordings(folder, rate):
    """Two classes, high and low tones, 12 recordings each of one to two seconds."""
    generator = torch.Generator().manual_seed(7)
    for name, low in (("high", 1500), ("low", 300)):
        (folder / name).mkdir()
        for number in range(12):
            hertz = low + 200 * torch.rand((), generator=generator).item()
            times = torch.arange(int(rate * (1 + torch.rand((), generator=generator).item()))) / rate
            tone = torch.sin(2 * math.pi * hertz * times) + 0.3 * torch.randn(len(times), generator=generator)
            with wave.open(str(folder / name / f"{number:02d}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(rate)
                file.writeframes((tone.clamp(-2, 2) * 16000).to(torch.int16).numpy().tobytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="recordings")
    parser.add_argument("--classes", type=int, default=35)
    parser.add_argument("--rate", type=int, default=16000, help="samples per second")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--smoke", action="store_true", help="four epochs on made tones, in seconds")
    arguments = parser.parse_args()
    if arguments.smoke:
        with tempfile.TemporaryDirectory() as folder:
            arguments.classes, arguments.rate, arguments.batch_size, arguments.epochs = 2, 8000, 8, 4
            write_recordings(Path(folder), arguments.rate)
            arguments.data = folder
            main(arguments)
    else:
        main(arguments)
