"""GPT-like training on documents packed into rows; attention does not cross documents.

python examples/gpt.py --documents 'corpus/*.jsonl'     # lines {"tokens": [1, 2, 3]}
python examples/gpt.py --smoke
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import pipegraph as pg
from pipegraph import operators as ops


def pipeline(documents, length, batch_size, device):
    graph = pg.Graph("gpt", seed=7)
    texts = graph.add(ops.ShardSelect(documents), name="select").then(ops.Load(), name="load", workers=2)
    # One token more than the model reads: the next token of each is its target.
    rows = texts.then(ops.Pack(length + 1, fields="tokens", drop_last=True), name="pack")
    batches = rows.then(ops.Batch(batch_size, drop_last=True), name="batch")
    batches.then(ops.Pin(), name="pin").then(ops.CopyToDevice(device), name="copy")
    return graph


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(width, 2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, length, width=64, heads=4, layers=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens, segments, positions):
        same = segments[:, :, None] == segments[:, None, :]
        mask = (same & torch.ones_like(same).tril())[:, None]
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def loss_of(model, batch):
    tokens, segments, positions = (batch[name].long() for name in ("tokens", "segment_ids", "position_ids"))
    logits = model(tokens[:, :-1], segments[:, :-1], positions[:, :-1])
    # A document's last token does not predict the first of the next one.
    targets = tokens[:, 1:].masked_fill(segments[:, 1:] != segments[:, :-1], -100)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def main(arguments):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = GPT(arguments.vocabulary, arguments.length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    graph = pipeline(arguments.documents, arguments.length, arguments.batch_size, device)
    with graph.loader(epochs=arguments.epochs) as loader:
        for epoch in range(loader.epoch, arguments.epochs):
            for batch in loader:
                loss = loss_of(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}")
        print(loader.profile())


def draw_documents(folder):
    draw = random.Random(7)
    for shard in range(2):
        with open(folder / f"documents-{shard}.jsonl", "w") as file:
            for _ in range(100):
                start = draw.randrange(64)
                tokens = [(start + step) % 64 for step in range(draw.randrange(5, 60))]
                file.write(json.dumps({"tokens": tokens}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", default="corpus/*.jsonl")
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="two epochs on drawn documents, in seconds")
    arguments = parser.parse_args()
    if arguments.smoke:
        with tempfile.TemporaryDirectory() as folder:
            draw_documents(Path(folder))
            arguments.documents = f"{folder}/*.jsonl"
            arguments.vocabulary, arguments.length, arguments.batch_size, arguments.epochs = 64, 64, 4, 2
            main(arguments)
    else:
        main(arguments)
