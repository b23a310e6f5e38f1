"""The examples of examples/trainers/, run for real: stopped in the middle of an epoch, resumed, every row once.

``make test-interop`` brings the trainers; those of torch alone run with the slow tests too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "trainers"
ROWS = 64

pytestmark = pytest.mark.slow


def run(script: str, folder: Path, *arguments: str, ranks: int = 0) -> str:
    """What an example prints; under torchrun with ``ranks``."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPTS / f"with_{script}.py"), str(folder), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps(folder: Path) -> list[list[list[int]]]:
    """The rows of each step, of each rank."""
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("rank*.jsonl"))
    ]


def rows(folder: Path) -> list[int]:
    return sorted(row for rank in steps(folder) for step in rank for row in step)


CASES: list[Any] = [
    ("lightning", 0),
    ("accelerate", 0),
    ("accelerate", 2),
    ("transformers", 0),
    ("ddp", 2),
    ("fsdp", 2),
]


@pytest.mark.parametrize(("script", "ranks"), CASES, ids=lambda value: str(value))
def test_a_run_stopped_in_the_middle_of_an_epoch_and_resumed_trains_on_every_row_once(
    tmp_path: Path, script: str, ranks: int
) -> None:
    if script in ("lightning", "accelerate", "transformers") and importlib.util.find_spec(script) is None:
        pytest.skip(f"needs {script}: make test-interop brings it")
    run(script, tmp_path, "--stop-after", "3", ranks=ranks)
    before = rows(tmp_path)
    assert 0 < len(before) < ROWS and len(set(before)) == len(before)
    said = run(script, tmp_path, "--resume", ranks=ranks)
    assert rows(tmp_path) == list(range(ROWS))
    if script in ("accelerate", "ddp"):
        assert "evaluated 61 rows, each once" in said


def test_a_resumed_run_takes_the_batches_that_the_whole_one_would_have_taken(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs lightning: make test-interop brings it")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    run("lightning", whole)
    run("lightning", stopped, "--stop-after", "3")
    run("lightning", stopped, "--resume")
    assert steps(whole) == steps(stopped)


def test_a_checkpoint_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    run("fsdp", tmp_path, "--stop-after", "3", ranks=2)
    run("fsdp", tmp_path, "--resume", ranks=1)
    assert rows(tmp_path) == list(range(ROWS))


def test_a_stream_in_hugging_faces_trainer_resumes_where_it_stopped(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: make test-interop brings it")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    run("transformers", whole, "--stream")
    run("transformers", stopped, "--stream", "--stop-after", "3")
    run("transformers", stopped, "--stream", "--resume")
    assert steps(whole) == steps(stopped)
    assert rows(stopped) == list(range(ROWS))


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> Any:
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setattr("accelerate.data_loader.DataLoader", pg.DataLoader)
    return accelerate.Accelerator(cpu=True)


def test_prepare_and_skip_first_batches_keep_threads(hugging_face: Any) -> None:
    import accelerate

    prepared = hugging_face.prepare(pg.DataLoader(range(8), 4, num_workers=1, workers="thread"))
    for loader in (prepared, accelerate.skip_first_batches(prepared, 1)):
        assert type(loader.base_dataloader) is pg.DataLoader
        assert loader.base_dataloader.workers == "thread"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_accelerate_replaces_says_so(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    import accelerate.data_loader

    monkeypatch.setattr(accelerate.data_loader, "DataLoader", torch.utils.data.DataLoader)
    with pytest.warns(
        pg.errors.PipegraphWarning, match=r"set accelerate\.data_loader\.DataLoader = pg\.Data"
    ):
        hugging_face.prepare(pg.DataLoader(range(8), 4, num_workers=workers))
    with (
        pytest.warns(pg.errors.PipegraphWarning, match="without pipegraph's workers"),
        pytest.raises(ValueError, match="thread"),
    ):
        hugging_face.prepare(pg.DataLoader(range(8), 4, num_workers=1, workers="thread"))


def test_torchdatas_loader_in_place_of_ours_says_so(hugging_face: Any) -> None:
    from accelerate.data_loader import prepare_data_loader

    with (
        pytest.warns(pg.errors.PipegraphWarning, match="leave out use_stateful_dataloader=True"),
        contextlib.suppress(ImportError),  # where torchdata is not installed
    ):
        prepare_data_loader(pg.DataLoader(range(8), 4), use_stateful_dataloader=True)


def test_a_prepared_loader_has_its_state_from_the_load_on_and_not_only_from_the_first_batch(
    hugging_face: Any,
) -> None:
    def prepared() -> Any:
        return hugging_face.prepare(pg.DataLoader(range(20), 4))

    loader = prepared()
    batches = iter(loader)
    next(batches), next(batches)
    again = prepared()
    again.load_state_dict(loader.state_dict())
    once_more = prepared()
    once_more.load_state_dict(again.state_dict())
    assert [batch.tolist()[0] for batch in once_more] == [8, 12, 16]


def test_a_stream_that_one_rank_reads_for_all_is_not_resumed_with_a_state_that_is_ahead(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.data_loader import prepare_data_loader

    class Numbers(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter(range(20))

    loader = prepare_data_loader(pg.DataLoader(Numbers(), 4), put_on_device=True)
    loader.load_state_dict(loader.state_dict())
    monkeypatch.setitem(loader.state._shared_state, "num_processes", 2)
    with pytest.raises(pg.errors.StateError, match="dispatch_batches=False"):
        loader.load_state_dict(loader.state_dict())


# -- Hugging Face's Trainer --------------------------------------------------------------------


def trainer(folder: Path, loader: Any = None, dataset: Any = None, **options: Any) -> tuple[Any, list[Any]]:
    """A ``Trainer``, and the rows that it will have trained on."""
    transformers = pytest.importorskip("transformers")
    rows: list[Any] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, row: Any, **_: Any) -> dict[str, Any]:
            rows.append(row.tolist())
            return {"loss": self.layer(row[:, None].float()).mean()}

    on_loader = type("Trainer", (pg.TrainOnLoader, transformers.Trainer), {})
    kind = transformers.Trainer if loader is None else on_loader
    arguments = transformers.TrainingArguments(
        str(folder),
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no", **options},
    )
    given = {} if loader is None else {"loader": loader}
    if dataset:
        given["train_dataset"] = dataset
    return kind(Model(), arguments, **given), rows


def rows_loader(rows: int = 12) -> Any:
    graph = pg.Graph("rows")
    graph.add(ops.FromSequence([{"row": row} for row in range(rows)], shuffle=True)).then(ops.Batch(4))
    return graph.loader(epochs=5)


def test_a_graph_is_trained_on_again_from_its_first_epoch(tmp_path: Path) -> None:
    with rows_loader() as loader:
        stopped, rows = trainer(tmp_path, loader, max_steps=2, save_strategy="no")
        stopped.train()
        first = list(rows)
        rows.clear()
        stopped.train()
        assert rows == first


def test_a_checkpoint_without_a_loaders_state_is_refused(tmp_path: Path) -> None:
    with rows_loader() as loader:
        saving, _ = trainer(tmp_path, loader, max_steps=2, save_steps=2)
        saving.train()
        (tmp_path / "checkpoint-2" / "loader0.pt").unlink()
        resumed, _ = trainer(tmp_path, loader, max_steps=4)
        with pytest.raises(pg.errors.StateError, match=r"loader0\.pt does not exist"):
            resumed.train(resume_from_checkpoint=True)


def test_a_trainer_takes_no_other_loader(tmp_path: Path, hugging_face: Any) -> None:
    prepared = hugging_face.prepare(pg.DataLoader(range(4)))
    for other in (torch.utils.data.DataLoader(range(4)), prepared):
        with pytest.raises(TypeError, match="not prepared by Accelerate, got <class"):
            trainer(tmp_path, other)


@pytest.mark.parametrize("make", [rows_loader, lambda: pg.DataLoader(range(8))])
def test_a_loader_into_which_a_state_was_loaded_does_not_tell_how_long_an_epoch_is(
    tmp_path: Path, make: Any
) -> None:
    with contextlib.ExitStack() as stack:
        loader, other = make(), make()
        for each in (loader, other) if isinstance(loader, pg.Loader) else ():
            stack.enter_context(each)
        batches = iter(other)
        next(batches)
        loader.load_state_dict(other.state_dict())
        with pytest.raises(pg.errors.StateError, match="leave that out"):
            trainer(tmp_path, loader)


def test_a_trainer_takes_a_loader_or_a_dataset(tmp_path: Path) -> None:
    with rows_loader() as loader, pytest.raises(TypeError, match="leave train_dataset out"):
        trainer(tmp_path, loader, Texts())


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row >= len(self):
            raise IndexError  # the Trainer iterates it for its lengths
        return {"row": row, "input_ids": [row] * (row * 7 % 16)}


def test_max_steps_counts_the_optimizers_steps_of_all_epochs(tmp_path: Path) -> None:
    with rows_loader() as loader:
        counted, rows = trainer(
            tmp_path, loader, max_steps=3, gradient_accumulation_steps=2, save_strategy="no"
        )
        counted.train()
    assert len(rows) == 5  # 2, the 1 that is left of the epoch, and 2 of the next
    assert counted.state.epoch == pytest.approx(5 / 3)


@pytest.mark.parametrize("own", [False, True])
def test_group_by_length_is_for_the_trainers_own_loader(
    tmp_path: Path, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setattr("accelerate.data_loader.DataLoader", pg.DataLoader)
    options = {
        "train_sampling_strategy": "group_by_length",
        "per_device_train_batch_size": 4,
        "max_steps": 16,
    }
    loader = None if own else pg.DataLoader(Texts(), 4, collate_fn=collate_rows)
    grouped, rows = trainer(tmp_path, loader, Texts() if own else None, save_strategy="no", **options)
    if own:
        grouped.data_collator = collate_rows
    grouped.train()
    assert sorted(row for batch in rows for row in batch) == list(range(64))
    spread = sum(
        max(lengths) - min(lengths) for lengths in ([row * 7 % 16 for row in batch] for batch in rows)
    )
    assert (spread < 64) == own  # in their own order: 9 or more in each of 16 batches


def collate_rows(samples: list[Any]) -> dict[str, Any]:
    return {"row": torch.tensor([sample["row"] for sample in samples])}
