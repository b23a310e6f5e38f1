"""The models of the engine that ``make schedules`` and the tests explore; ``docs/schedules.md`` says how to write one."""

from scheduler.model import Model

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
    WaitingRows,
)
from schedule_models.queues import AccountModel, ChannelModel, SequencedChannelModel
from schedule_models.readers import BlockReaderModel
from schedule_models.remote import Isolated, ProcessStage
from schedule_models.replicas import ReducerModel

MODELS: dict[str, type[Model]] = {
    model.__name__: model
    for model in (
        ChannelModel,
        SequencedChannelModel,
        AccountModel,
        ThreeStages,
        SeveralWorkers,
        Units,
        WaitingRows,
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
        Isolated,
        BlockReaderModel,
        ReducerModel,
    )
}
