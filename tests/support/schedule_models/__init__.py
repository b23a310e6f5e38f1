"""The models of the engine that ``make schedules`` and the tests explore; ``docs/schedules.md`` says how to write one."""

import pkgutil
from importlib import import_module
from pathlib import Path

from scheduler.model import Model

import pipegraph.engine.kinds
import pipegraph.loader.loader
import pipegraph.profile.tuner
from schedule_models.pipelines import (
    Completion,
    CompletionBelow,
    Diamond,
    LittleMemory,
    Mixed,
    Regrouped,
    Resized,
    RouteToMerge,
    SeveralWorkers,
    SkippedRows,
    ThreeStages,
    Units,
)
from schedule_models.queues import ChannelModel, SequencedChannelModel
from schedule_models.readers import BlockReaderModel
from schedule_models.remote import ProcessStage
from schedule_models.replicas import ReducerModel

# Before the first schedule: clocks and locks of modules that are imported later are not put in the scheduler's hands.
for module in pkgutil.iter_modules(pipegraph.engine.kinds.__path__, "pipegraph.engine.kinds."):
    import_module(module.name)

MODELS: dict[str, type[Model]] = {
    model.__name__: model
    for model in (
        ChannelModel,
        SequencedChannelModel,
        ThreeStages,
        SeveralWorkers,
        Units,
        Completion,
        CompletionBelow,
        RouteToMerge,
        Mixed,
        Diamond,
        Regrouped,
        SkippedRows,
        LittleMemory,
        Resized,
        ProcessStage,
        BlockReaderModel,
        ReducerModel,
    )
}

_PACKAGE = Path(pipegraph.__file__).parent

LINES = tuple(
    str(path.relative_to(_PACKAGE.parent))
    for folder in ("engine", "reader", "loader", "replicas")
    for path in (_PACKAGE / folder).rglob("*.py")
    if path.name != "__init__.py"
)
"""Files of which every line can be a switch point."""
