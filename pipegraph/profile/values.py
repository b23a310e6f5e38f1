"""``Profile`` and ``ChannelProfile``: frozen values, as ``loader.profile()`` returns them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from pipegraph.engine.stage.ledger import Quarantined
from pipegraph.engine.tracing import Events
from pipegraph.measurements import Measured, StageProfile, documented, in_view, measurement

from .bottleneck import CONSUMER, STARTING, Cause

if TYPE_CHECKING:
    from .advice import Advice

MIN_S = 0.05
"""Passes shorter than this, shown as 0.0 s, measure start-up rather than the bottleneck."""


@documented
@dataclass(frozen=True)
class ChannelProfile:
    """One queue between two stages."""

    producer: str = measurement("the stage that fills it.", "text", default="")
    consumer: str = measurement('the stage that empties it, or ``"consumer"``.', "text", default="")
    capacity: int = measurement("items that it may hold.", metric="channel_capacity")
    depth: int = measurement("items that it holds, or held when the last pass ended.", metric="channel_depth")
    gained: int = measurement("by how many items it is longer than when counting began.")
    nbytes: int = measurement("bytes of these.", "bytes")
    put_wait_s: float = measurement("seconds that workers waited for room in it, in all.", "seconds")
    get_wait_s: float = measurement("seconds that workers waited for items of it, in all.", "seconds")
    in_bursts: bool = measurement(
        "whether both sides waited for it, each for a tenth of its time or more.", "text", default=False
    )


@documented
@dataclass(frozen=True, repr=False)
class Profile:
    """A look at a loader; ``str()`` is a table of at most 100 columns."""

    stages: Mapping[str, StageProfile] = measurement(
        "by name, from source to sink, stages that were left out included.", "text", default=dict
    )
    bottleneck: str = measurement(
        'the stage that sets the pace, or ``"consumer"`` where the training loop does, or where passes ran for less '
        "than :data:`MIN_S`.",
        "text",
        default=CONSUMER,
    )
    stall_s: float = measurement(
        "seconds that training waited for data, in all.", "seconds", ": log", metric="stall_seconds_total"
    )
    samples_per_s: float = measurement("samples delivered per second of passes.", "per second", ": log")
    quarantined: tuple[Quarantined, ...] = measurement(
        "what failed and was left out: the last 1,000 of the whole run.", "text", default=()
    )
    quarantined_count: int = measurement("samples that were left out, in all.", metric="quarantined_total")
    graph: str = measurement("the graph's name.", "text", default="pipeline")
    elapsed_s: float = measurement("seconds that passes ran.", "seconds", metric="running_seconds_total")
    passes: int = measurement("passes that have begun.")
    items: int = measurement("chunks delivered.", metric="items_total")
    samples: int = measurement("samples delivered.", metric="samples_total")
    first_batch_s: float | None = measurement(
        "seconds from the first ``iter()`` to the first chunk; None before it.", "seconds", default=None
    )
    cause: Cause = measurement(
        'why the bottleneck is one: ``"consumer"`` (training sets the pace), ``"stage"`` (its own work), ``"storage"`` '
        '(reading), ``"cores"`` (all are in use), ``"lock"`` (it holds the GIL, for which others wait), '
        '``"bursts"`` (a queue is empty in turn with full), or ``"unknown"``.',
        "text",
        default="unknown",
    )
    channels: tuple[ChannelProfile, ...] = measurement("the queues, in order.", "text", default=())
    step_s: float = measurement("mean seconds of a training step, without waiting.", "seconds", ": log")
    wait_p50_s: float = measurement(
        "seconds that training waited for a chunk, within 1 %: the median.",
        "seconds",
        metric="wait_seconds 0.5",
    )
    wait_p90_s: float = measurement("the same: 90 % took no longer.", "seconds", metric="wait_seconds 0.9")
    wait_p99_s: float = measurement(
        "the same: 99 % took no longer.", "seconds", ": log", metric="wait_seconds 0.99"
    )
    cores_used: float = measurement("cores that this process and its workers' kept running.", views=": log")
    cores: float = measurement("cores that they may use.")
    memory_bytes: int = measurement("bytes that chunks hold now.", "bytes", ": log", metric="memory_bytes")
    memory_peak_bytes: int = measurement("the most that they held in this run.", "bytes")
    memory_limit: int = measurement("bytes that chunks may hold.", "bytes", metric="memory_limit_bytes")
    pinned_bytes: int = measurement("pinned memory of stages.", "bytes", metric="pinned_bytes")
    wake_s: float = measurement(
        "mean seconds that a thread with a free core is late after its wake: it waits for the GIL.", "seconds"
    )
    measured: Measured | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", MappingProxyType(dict(self.stages)))

    def __reduce__(self) -> tuple[Any, ...]:
        # To other ranks; a read-only view cannot be pickled, and what stages report themselves need not be.
        values = (getattr(self, name) for name in self.__dataclass_fields__ if name != "measured")
        return type(self), tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in values)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; keys of samples as they came."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "measured"}
        plain["stages"] = {name: asdict(stage) for name, stage in self.stages.items()}
        plain["channels"] = [asdict(channel) for channel in self.channels]
        plain["quarantined"] = [asdict(entry) for entry in self.quarantined]
        return plain

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`to_dict` as JSON; keys of samples that JSON does not know become text."""
        return json.dumps(self.to_dict(), indent=indent, default=str)

    def scalars(self) -> dict[str, float]:
        """Plain numbers under short names, as loggers such as TensorBoard and W&B take them."""
        found = {log: getattr(self, name) for name, _, log in in_view(Profile, "log")}
        found["stall_share"] = self.stall_share
        for stage, values in self.stages.items():
            if values.works:
                found |= {
                    f"{stage}/{log}": getattr(values, name) for name, _, log in in_view(StageProfile, "log")
                }
        return {name: float(value) for name, value in found.items()}

    @property
    def advice(self) -> Advice:
        """The sizes that promise most, of all stages together, and what allows no more: one step, whose settings
        ``graph.resize(profile.advice.settings)`` takes. The next profile shows what it brought."""
        from .advice import advise

        return advise(self)

    @property
    def stall_share(self) -> float:
        """Share 0..1 of the time of passes that the training loop waited for data."""
        return self.stall_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def conclusive(self) -> bool:
        """Whether passes ran long enough for ``bottleneck`` to mean anything."""
        return self.items > 0 and self.elapsed_s >= MIN_S

    @property
    def conclusion(self) -> str:
        """The bottleneck in a sentence, with its evidence."""
        from .table import conclude

        return conclude(self)

    def __repr__(self) -> str:
        holds = ""
        if self.conclusive:
            if self.bottleneck != CONSUMER:
                holds = f", {self.bottleneck!r} holds back"
            elif self.stall_share <= STARTING:
                holds = ", training sets the pace"
        return (
            f"<Profile {self.graph}: {self.samples_per_s:,.0f} samples/s, waited {self.stall_s:.2f} s{holds}>"
        )

    def __str__(self) -> str:
        from .table import render

        return render(self)


class Watched(Protocol):
    """A loader, as recordings, the live view and the tuner know it."""

    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def profile(self, since: Profile | None = None) -> Profile: ...
    def _trace(self, on: bool) -> tuple[Events, dict[int | None, str]]: ...
