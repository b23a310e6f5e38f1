"""The contract of kinds: all that the planner, the engine and states ask of the kind of a stage's operator.

``engine.kinds`` lists them: one file each, with its worker loop and how its cursors (see ``docs/resuming.md``) are made
of those of its inputs. A kind has no state of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pipegraph.chunk import Cursor
from pipegraph.components import History, Source
from pipegraph.contracts import Operator

if TYPE_CHECKING:
    from pipegraph.planning.plan import Plan, StagePlan


@dataclass(eq=False, repr=False)
class Restart:
    """How a stage resumes from a state; applies to the run's first epoch only."""

    step: int = 0
    cursor: Cursor = None


class Reached(NamedTuple):
    """What a rank has consumed of an edge: all before ``cursor``, and ``more`` samples after it.

    ``holes`` are steps of the source after the cursor that were consumed too, as in ``pipegraph.order.left``.
    """

    cursor: Cursor
    more: int = 0
    holes: str = ""


class StageKind:
    """A kind of operators. Where nothing else is said, the answers are those of a stage that passes items on in place.

    Attributes:
        parallel: whether several workers may share a stage's items, which then have tickets.
        in_place: whether each item leaves with the cursors with which it came.
        hands_on: whether it only joins or splits streams: no work is done on items.
        keeps: whether its operators keep what they were given, so that no item can be tried again.
        by_sample: whether its input may be filtered by sample, because chunks keep their lineages.
        expands: whether it makes several items of one.
        gathers: whether it makes one item of several.
        collects: whether its operators that take blocks are given whole bundles.
        stateless: why its operators cannot have a ``state_dict()``, in words.
        judges_rows: whether it applies the stage's policy to each row of a batch.
        reads_in_turn: whether its operators decide which of several inputs is read next.
        sends_in_turn: whether its operators decide which of several outputs gets an item.
    """

    parallel = False
    in_place = False
    hands_on = False
    keeps = False
    by_sample = False
    expands = False
    gathers = False
    collects = False
    judges_rows = False
    stateless = ""
    reads_in_turn = False
    sends_in_turn = False

    def loop(self, stage: Any, worker: Any) -> Iterator[Any]:
        """The loop of one worker (a ``StageRun`` and its ``Worker``): a generator; see ``engine.stage_worker.Loop``.

        ``engine.stage.parallel`` and ``engine.stage.serial`` serve most kinds; ``kinds.rows``, ``expand`` and
        ``source`` have their own.
        """
        raise NotImplementedError

    # -- what the planner asks ----------------------------------------------------------------

    def stays(self, operator: Operator | Source) -> str | None:
        """Why an operator stays in the trainer's process whatever its backend; None if it may run in another."""
        if self.hands_on:
            return f"{operator.name} only hands items on"
        if operator.traits.in_trainer:
            return f"{operator.name} works on the trainer's own devices, files or memory"
        return None

    def overtakes(self, operator: Operator | Source) -> bool:
        """Whether items may finish in another order than they began in, if there are several workers."""
        return self.parallel and not operator.traits.one_worker

    def one_to_one(self, operator: Operator | Source) -> bool:
        """Whether each item of the input becomes one of the output, independently of others."""
        return False

    def fixed(self, operator: Operator | Source) -> str | None:
        """Why a stage has a single worker; None if it may have several."""
        several = self.parallel and not operator.traits.one_worker and not cast(Operator, operator).stateful
        return None if several else f"{operator.name} works in sequence"

    def level(self, operator: Operator | Source, inputs: Sequence[str]) -> str:
        """What the output consists of: ``"sample"``, ``"batch"`` ..., for those of the inputs."""
        return inputs[0] if operator.gives == "same" else operator.gives

    def hands_over_rows(self, stage: StagePlan) -> bool:
        """Whether rows of its output may travel in bundles."""
        return False

    def elastic(self, stage: StagePlan) -> bool:
        """Whether ranks that delivered equally many items have the same cursor, from which any number can resume."""
        return not stage.traits.out_of_step and stage.spec.ordered and stage.work.elastic

    def chunks(self, operator: Operator | Source, inputs: Sequence[int], world_size: int) -> int | None:
        """Chunks out per epoch for those of its inputs; None if the data decides."""
        by_ranks = operator.traits.length_for
        if by_ranks is not None:
            return by_ranks(inputs[0], world_size)
        return cast(Operator, operator).length(inputs[0])

    def has_length(self, stage: StagePlan) -> bool:
        """Whether the number of its chunks follows from that of its inputs, or of a source's data."""
        return self.chunks(stage.operator, [1000] * len(stage.upstream), 1) is not None

    def steps(
        self,
        stage: StagePlan,
        inputs: Sequence[int | None],
        epoch: int,
        rank: int,
        world_size: int,
        seed: int | None,
        history: History,
    ) -> int | None:
        """Chunks that a rank gives in an epoch for those of its inputs; None if the data decides.

        Args:
            seed: by which samples are dealt; None before the ranks have agreed on one.
            history: what was consumed of this epoch at other world sizes.
        """
        known = [count for count in inputs if count is not None]
        return None if len(known) < len(inputs) else self.chunks(stage.operator, known, world_size)

    def bundle_sizes(
        self, stage: StagePlan, plan: Plan, reader: Any, world_size: int
    ) -> tuple[int, int, int, int]:
        """For ``Pace``: the most rows of a bundle, the fewest, rows of a batch, and the most batches in a bundle."""
        return max(1, stage.capacity // stage.workers), 1, sys.maxsize, 1

    def feed(self, stage: Any, reader: Any, activity: Any) -> tuple[Any, Any] | None:
        """A channel that feeds a stage without inputs, and the pump that fills it; None if there is none."""
        return None

    # -- cursors ------------------------------------------------------------------------------

    def split(self, stage: StagePlan, cursor: Cursor) -> tuple[Restart, list[Cursor]]:
        """The stage's own restart behind a cursor of its output (not None), and the cursors of its inputs."""
        return Restart(), [cursor]

    def reached(
        self, stage: StagePlan, at: Reached, draw: tuple[int, int], drops: bool
    ) -> Sequence[Reached] | None:
        """What was consumed of each input when ``at`` was of the output; None if that is not known.

        Args:
            draw: (seed, epoch).
            drops: whether items may be left out by the stage's policy.
        """
        return None if drops and at.more else [at]

    def why_unknown(self, operator: Operator | Source) -> str | None:
        """Why its cursors never tell what was consumed; None if they may."""
        return None


KindOf = Callable[[Operator | Source], StageKind]
"""Finds an operator's kind; ``engine.kinds.kind_of``, given to the planner."""
