"""Batches that fail as a whole."""

import cv2
import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops

IMAGE = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()


def collate(samples):
    images = [sample["image"] for sample in samples]
    return {"image": images[:-1] if samples[0]["number"] == 4 else images}


def graph_of(policy, backend):
    """Sixteen samples in batches of four; the second batch lacks an image."""
    graph = pg.Graph("failing")
    samples = [{"image": IMAGE, "number": number} for number in range(16)]
    batches = graph.add(ops.FromSequence(samples)).then(ops.Batch(4, collate=collate))
    batches.then(ops.DecodeImage(8), name="decode", on_error=policy, backend=backend)
    return graph


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_skip_leaves_out_a_batch_that_fails_as_a_whole(backend):
    with graph_of(pg.Skip(), backend).loader() as loader:
        assert [len(batch["image"]) for batch in loader] == [4, 4, 4]
        assert len(loader.profile().quarantined) == 4
