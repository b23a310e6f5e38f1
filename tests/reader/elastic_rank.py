"""One rank of a real run; see test_real_ranks.py. Not a test itself. Without torchrun GROUP_STORE names the group's file.

Arguments: the job, the folder of shards, the folder for results, and the steps after which to stop (0: never).
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pipegraph as pg
from pipegraph import operators as ops


def keys(loader: Any, limit: int) -> list[list[str]]:
    found = []
    for number, chunk in enumerate(loader.chunks(), 1):
        names = [row["key"] for row in chunk.data] if isinstance(chunk.data, list) else chunk.keys
        found.append([f"{position}:{key}" for position, key in zip(chunk.positions, names, strict=True)])
        dist.all_reduce(torch.ones(1))  # a rank with fewer steps would leave the others here
        if number == limit:
            break
    return found


def elastic(folder: Path, out: Path, limit: int, **where: Any) -> list[list[str]]:
    """Continue from the checkpoint if there is one, and leave one behind."""
    graph = pg.Graph("elastic", seed=5)
    select = ops.ShardSelect(folder / "part-*.tar", order=pg.order.LaneOrder(lanes=12))
    graph.add(select).then(ops.Load(), workers=2).then(ops.Batch(global_size=12, collate=list))
    return through_checkpoints(graph, out, limit, **where)


def resized(folder: Path, out: Path, limit: int) -> list[list[str]]:
    """The same with a global size that 8, 6, 5, 16, 7 and 1 ranks divide; a sample's key is its first number."""
    graph = pg.Graph("resized", seed=5)
    select = ops.ShardSelect(folder / "part-*.npy", order=pg.order.LaneOrder(lanes=48))
    batches = (
        graph.add(select).then(ops.Load()).then(name_by_value).then(ops.Batch(global_size=1680, collate=list))
    )
    assert batches is not None
    return through_checkpoints(graph, out, limit)


def name_by_value(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": int(sample["array"][0])}


def through_checkpoints(graph: pg.Graph, out: Path, limit: int, **where: Any) -> list[list[str]]:
    """One epoch, or what is left of it, up to ``limit`` steps."""
    import torch.distributed.checkpoint as dcp  # slow to import, so only where it is used

    checkpoint = out / "checkpoint"
    with graph.loader(**where) as loader:
        if checkpoint.exists():
            state: dict[str, Any] = {"loader": loader.state_dict()}
            dcp.load(state, checkpoint_id=checkpoint)
            loader.load_state_dict(state["loader"])
        found = keys(loader, limit)
        # Batches of one size: after the last step of an epoch the tail's global batch may be short.
        dcp.save({"loader": loader.state_dict()}, checkpoint_id=checkpoint)
        return found


def stateful(folder: Path, out: Path, limit: int) -> list[list[str]]:
    """The loader itself as a ``Stateful``: saved and loaded by torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    graph = pg.Graph("stateful", seed=5)
    select = ops.ShardSelect(folder / "part-*.tar", order=pg.order.LaneOrder(lanes=12))
    graph.add(select).then(ops.Load()).then(ops.Batch(4, collate=list))
    with graph.loader() as loader:
        if (out / "checkpoint").exists():
            dcp.load({"loader": loader}, checkpoint_id=out / "checkpoint")
        found = keys(loader, limit)
        dcp.save({"loader": loader}, checkpoint_id=out / "checkpoint")
        return found


def sampled(folder: Path, out: Path, limit: int) -> list[list[str]]:
    """A ``pg.DataLoader`` with a sampler that splits 60 rows: one epoch, or what is left of it, up to ``limit`` steps."""
    import torch.distributed.checkpoint as dcp
    from torch.utils.data import DistributedSampler

    loader = pg.DataLoader(range(60), 3, sampler=DistributedSampler(range(60)))  # type: ignore[var-annotated]
    if (out / "checkpoint").exists():
        dcp.load({"loader": loader}, checkpoint_id=out / "checkpoint")
    found = [[str(row) for row in batch.tolist()] for batch in itertools.islice(loader, limit or None)]
    dcp.save({"loader": loader}, checkpoint_id=out / "checkpoint")
    return found


def mesh(folder: Path, out: Path, limit: int) -> list[list[str]]:
    """Two data-parallel groups of two tensor-parallel ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return elastic(folder, out, limit, mesh=grid["dp"])


def keep(sample: dict[str, Any]) -> bool:
    return bool(sample["label"] % 3)


def fail_on_some(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] % 7 == 1:
        raise ValueError("a bad sample")
    return sample


def unequal(folder: Path, out: Path, limit: int) -> list[list[str]]:
    """Filters and skips leave each rank another number of samples; the steps are equal all the same."""
    graph = pg.Graph("unequal", seed=5)
    node = graph.add(ops.ShardSelect(folder / "part-*.tar")).then(ops.Load()).then(ops.Filter(keep))
    node.then(fail_on_some, on_error=pg.Skip(0.9)).then(ops.Batch(3, collate=list))
    with graph.loader(equal_steps=True, epochs=2) as loader:
        return keys(loader, limit) + keys(loader, limit)


def main() -> None:
    job, folder, out, limit = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    store = os.environ.get("GROUP_STORE")
    where = {"init_method": f"file://{store}"} if store else {}
    dist.init_process_group(
        "gloo", **where, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    found = {
        "sampled": sampled,
        "elastic": elastic,
        "resized": resized,
        "mesh": mesh,
        "unequal": unequal,
        "stateful": stateful,
    }[job](folder, out, limit)
    name = f"{job}-{dist.get_world_size()}-{limit}-{dist.get_rank()}.json"
    (out / name).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
