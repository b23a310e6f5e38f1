"""The body of a worker's thread: it opens the operator, works in every run, and closes it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pipegraph import concurrency
from pipegraph.contracts import history_of
from pipegraph.engine.activity import Cancelled, Leaving
from pipegraph.engine.run import Run
from pipegraph.engine.stage_worker import HALFWAY, Worker
from pipegraph.errors import note
from pipegraph.global_generators import enter_worker
from pipegraph.planning.plan import StagePlan
from pipegraph.torch_modes import narrow

if TYPE_CHECKING:
    from pipegraph.engine.crew import Crew


def live(crew: Crew, stage: StagePlan, worker: Worker) -> None:
    """See the module docstring."""
    worker.thread, crew.local.worker = concurrency.current_thread(), worker
    opened = False
    try:
        worker.meter.thread_begins()
        narrow()
        enter_worker(crew.seed, stage.name)
        if ended(crew, worker):
            return
        if worker.operator is None:
            worker.operator = crew.make_operator(stage, worker.index)
        crew.open_operator(stage, worker)
        opened = True
        join(crew, stage, worker)
        serve(crew, stage, worker)
    except Cancelled:  # closed, or failed elsewhere
        pass
    except BaseException as error:
        crew.lost(stage, worker, error)
    finally:
        worker.meter.thread_ends()
        if opened:
            crew.close_operator(stage.name, worker.operator)
        with crew.threads.lock:
            crew.remove(stage, worker)


def join(crew: Crew, stage: StagePlan, worker: Worker) -> None:
    """The worker's operator is open: from now on it takes part. One that is late joins the current run, or waits for
    the next: only then its source can be told where that begins."""
    threads = crew.threads
    begun: Run | None = None
    while True:
        if worker.late:
            threads.wait_until(lambda: ended(crew, worker) or (crew.run is not None and not crew.run.over))
        with threads.lock:
            if ended(crew, worker):
                raise Cancelled
            run = crew.run
            if not worker.late or (run is begun and run is not None and not run.over):
                worker.ready, worker.run = True, run
                if run is not None:
                    run.activity.attach()
                    crew.apply_size(run, stage.name)
                threads.changed()
                return
        if run is not None and stage.source is not None:
            worker.operator.begin_run(run.first_epoch, history_of(run.history, stage.name))
        begun = run


def ended(crew: Crew, worker: Worker) -> bool:
    return crew.threads.closed or worker.leaves


def serve(crew: Crew, stage: StagePlan, worker: Worker) -> None:
    """Work in every run, until the crew is closed or the worker is to leave."""
    while (run := await_run(crew, worker)) is not None:
        try:
            work(stage, worker, run)
        except Cancelled:
            pass
        except BaseException as error:
            run.fail(error)
        finally:
            with crew.threads.lock:
                worker.run = None
                if worker.leaves:
                    worker.ready = False
                    crew.apply_size(run, stage.name)
                crew.threads.changed()
            run.activity.pause()
            run = None  # the error's traceback holds this frame


def await_run(crew: Crew, worker: Worker) -> Run | None:
    """The next run, or None if there is none for this worker."""
    threads = crew.threads
    threads.wait_until(lambda: worker.run is not None or ended(crew, worker))
    with threads.lock:
        if worker.run is not None and not threads.closed:
            return worker.run
        worker.ready = False
        return None


def work(stage: StagePlan, worker: Worker, run: Run) -> None:
    """Work in a run."""
    try:
        loop = stage.kind.loop(run.stages[stage.name], worker)
        with suppress(Leaving):
            for pause in loop:
                if worker.leaves and pause is not HALFWAY:
                    return
    except Cancelled:
        raise
    except BaseException as error:
        note(error, f"pipegraph: in stage {stage.name!r}")
        raise
    finally:
        worker.meter.began_ns = 0  # the run may have ended in the middle of an item
        loop = run = None  # type: ignore[assignment]  # the error's traceback holds this frame
