"""The dataset of these examples, and a record of the rows that were trained on: one file per rank, a line per step."""

import json
from pathlib import Path

import torch

ROWS = 64


class Numbers(torch.utils.data.Dataset):
    """``{"x": float32 (4,), "y": float32 (1,), "row": int64}``."""

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        x = torch.tensor([row, row % 3, row % 5, 1.0]) / ROWS
        return {"x": x, "y": x.sum()[None], "row": row}


def record(folder, rank, rows):
    """Note the rows of one step."""
    with (Path(folder) / f"rank{rank}.jsonl").open("a") as file:
        file.write(json.dumps(torch.as_tensor(rows).tolist()) + "\n")
