"""``Dali``: a whole NVIDIA DALI pipeline, or a function of its dynamic mode, as a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator
from pipegraph.errors import DataError, GraphError, shown
from pipegraph.integers import integer
from pipegraph.operators.images.dali_runners import DaliError, DaliRunner, open_dali
from pipegraph.parameters import function_name
from pipegraph.randomness import generator


@final
class Dali(Operator):
    """A DALI definition on batches: fields in by name and outputs out by name, through DLPack.

    Its random operators are keyed by the batch's first sample, so that a resume is exact. The fields that
    the definition names are replaced by the outputs, the others ride along.

    Args:
        pipeline_def: a ``@pipeline_def`` function fed by ``fn.external_source(name=FIELD)``, or a function on
            ``nvidia.dali.experimental.dynamic`` batches whose parameters are named after the fields (and ``rng``).
        outputs: names of what it returns.
        num_threads: DALI's own threads, per worker.
        device_id: CUDA device, or None for the CPU alone.

    Raises:
        GraphError: the definition cannot be called, ``outputs`` is empty or a text, or ``num_threads`` is below 1;
            while it runs: a batch lacks a field, or the definition returns another number of outputs.
        MissingExtraError: when a worker opens it: DALI is not installed.
    """

    name = "dali"
    needs = "batch"
    depends_on = "item|random"

    def __init__(
        self,
        pipeline_def: Callable[..., Any],
        outputs: Sequence[str] = ("image",),
        num_threads: int = 1,
        device_id: int | None = None,
    ) -> None:
        if not callable(pipeline_def):
            raise GraphError(
                f"Dali: a @pipeline_def function or a function on ndd batches is needed, got {pipeline_def!r}"
            )
        if isinstance(outputs, str) or not outputs:
            raise GraphError(f"Dali: outputs must be a sequence of names, got {outputs!r}")
        self.definition = pipeline_def
        self.outputs_named = tuple(outputs)
        self.num_threads = integer(num_threads, "Dali: num_threads")
        self.device_id = device_id
        self._runner: DaliRunner
        self._context = Context("")

    def config(self) -> dict[str, Any]:
        return {"definition": function_name(self.definition), "outputs": self.outputs_named}

    def open(self, context: Context) -> None:
        self._context = context
        self._runner = open_dali(
            self.definition, self.outputs_named, num_threads=self.num_threads, device_id=self.device_id
        )

    def close(self) -> None:
        self._runner.close()

    def process(self, chunk: Chunk) -> Chunk:
        data = chunk.data
        if not isinstance(data, dict):
            raise DataError(f"Dali: batches must be dicts of fields, got {type(data).__name__}")
        count = len(chunk.row_lineages)
        rng = generator(self._context.seed, chunk.epoch, chunk.lineages[0], self._context.stage)
        try:
            made = self._runner.run(data, count, rng)
        except DaliError as error:
            if error.index is not None:
                error.add_note(
                    f"pipegraph: it is sample {shown(chunk.keys[error.index])} of the batch that fails"
                )
            raise
        chunk.keys = chunk.own_keys
        chunk.data = {name: value for name, value in data.items() if name not in self._runner.inputs} | made
        return chunk
