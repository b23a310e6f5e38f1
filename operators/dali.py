"""``Dali``: a whole NVIDIA DALI pipeline as a stage.

The pipeline is made once per worker. Each of its random operators is given its state as an input (DALI's own
``_random_state`` argument), filled for every batch from the generator of that batch: what is delivered depends on
nothing that ran before, so that a resume is exact.

Arrays go in as they are: CPU inputs are fed with ``no_copy``, which DALI would not do by itself. The caller holds
them until the outputs are there, which is when DALI has read them. Outputs come out through DLPack, in DALI's own
memory, which is not written again while anybody holds them: DALI's dynamic executor counts references, and no other
is used here. What DALI copies all the same: an input that a pipeline returns as it came, or reshaped, and inputs for
the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator
from pipegraph.errors import DataError, GraphError, extra_module, shown
from pipegraph.integers import integer
from pipegraph.parameters import function_name
from pipegraph.randomness import generator

_STATE_WORDS = 7
"""uint32 words of one DALI random state (25 bytes)."""


@final
class Dali(Operator):
    """A DALI pipeline on batches: fields in by name and outputs out by name, through DLPack.

    Its random operators are keyed by the batch's first sample, so that a resume is exact. The fields that
    the pipeline names are replaced by the outputs, the others ride along. An output is a tensor (samples, ...) where
    all samples have one shape, else a list of tensors. DALI's decoders fail for a whole batch.

    Args:
        pipeline_def: a ``@pipeline_def`` function fed by ``fn.external_source(name=FIELD)``.
        outputs: names of what it returns.
        num_threads: DALI's own threads, per worker.
        device_id: CUDA device, or None for the CPU alone.

    Raises:
        GraphError: it is no ``@pipeline_def`` function, ``outputs`` is empty or a text, or ``num_threads`` is below 1;
            when a worker opens it: the pipeline returns another number of outputs, or cannot be fed or resumed.
        MissingExtraError: when a worker opens it: DALI is not installed.
        DataError: while it runs: a batch lacks a field.
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
        if not getattr(pipeline_def, "_is_pipeline_def", False):
            raise GraphError(f"Dali: a @pipeline_def function is needed, got {shown(pipeline_def)}")
        if isinstance(outputs, str) or not outputs:
            raise GraphError(f"Dali: outputs must be a sequence of names, got {shown(outputs)}")
        self.definition = pipeline_def
        self.outputs_named = tuple(outputs)
        self.num_threads = integer(num_threads, "Dali: num_threads")
        self.device_id = device_id
        self._pipeline: DaliPipeline
        self._context = Context("")

    def config(self) -> dict[str, Any]:
        return {"definition": function_name(self.definition), "outputs": self.outputs_named}

    def open(self, context: Context) -> None:
        self._context = context
        extra_module("nvidia.dali", "dali", "Dali", "nvidia-dali-cuda130")
        made = partial(self.definition, num_threads=self.num_threads, device_id=self.device_id)
        self._pipeline = DaliPipeline(made, self.outputs_named)

    def close(self) -> None:
        self._pipeline.close()

    def process(self, chunk: Chunk) -> Chunk:
        data = chunk.data
        if not isinstance(data, dict):
            raise DataError(f"Dali: batches must be dicts of fields, got {type(data).__name__}")
        rng = generator(self._context.seed, chunk.epoch, chunk.lineages[0], self._context.stage)
        made = self._pipeline.run(data, len(chunk.row_lineages), rng)
        chunk.keys = chunk.own_keys
        chunk.data = {name: value for name, value in data.items() if name not in self._pipeline.inputs} | made
        return chunk


class DaliPipeline:
    """Runs one batch at a time, for one worker; ``inputs`` are the fields that the definition names."""

    inputs: tuple[str, ...] = ()

    def __init__(self, definition: Callable[..., Any], outputs: Sequence[str]) -> None:
        self._definition = definition
        self._outputs = tuple(outputs)
        self._batch_size = 0
        self._pipeline: Any = None
        self._states: tuple[str, ...] = ()
        self._build(1)  # an unfit definition is found here and not at the first batch

    def run(self, fields: Mapping[str, Any], count: int, rng: np.random.Generator) -> dict[str, Any]:
        """The outputs of a batch of ``count`` samples, by name; blocks until they are there."""
        if self._pipeline is None or count > self._batch_size:
            self._build(max(count, self._batch_size))
        feed = {name: _for_dali(_field(fields, name)) for name in self.inputs}
        words = rng.integers(0, 2**32, (len(self._states), _STATE_WORDS), dtype=np.uint32)
        for name, state in zip(self._states, words, strict=True):
            feed[name] = [state] * count
        try:
            results = self._pipeline.run(**feed)
        except RuntimeError:
            self.close()  # DALI says that it is no longer valid; the next run gets a new one
            raise
        return {name: _from_list(result) for name, result in zip(self._outputs, results, strict=True)}

    def close(self) -> None:
        """End DALI's threads. Idempotent."""
        self._pipeline = None

    def _build(self, batch_size: int) -> None:
        from nvidia.dali import fn, types

        pipeline = self._definition(
            batch_size=batch_size,
            prefetch_queue_depth=1,  # one chunk in, one chunk out
            exec_pipelined=True,
            exec_async=True,
            exec_dynamic=True,  # the others write outputs again that are still held
        )
        instances = _instances(pipeline._graph_out)
        if len(pipeline._graph_out) != len(self._outputs):
            raise GraphError(
                f"Dali: the pipeline returns {len(pipeline._graph_out)} outputs, but outputs={self._outputs}"
            )
        inputs: list[str] = []
        states: list[str] = []
        with pipeline:
            for instance in instances:
                schema = instance._op.schema
                if schema.Name() == "ExternalSource":
                    inputs.append(_fed_name(instance))
                    if instance._op._device == "cpu" and instance._op._no_copy is None:
                        instance.spec.AddArg("no_copy", True)
                elif schema.HasRandomStateArg():
                    name = f"pipegraph_random_state_{len(states)}"
                    node = fn.external_source(name=name, dtype=types.UINT32, ndim=1, no_copy=True)
                    instance.spec.AddArgumentInput(
                        "_random_state", node.name, node.ndim, node.dtype, node.layout
                    )
                    instance.inputs.append(node)
                    states.append(node.name)
                elif schema.IsStateful():
                    raise GraphError(
                        f"Dali: {schema.Name()} keeps a state of its own, so the pipeline cannot be resumed: "
                        "read the data in the stages before, and feed it by fn.external_source(name=FIELD)"
                    )
        pipeline.build()
        self._pipeline, self._batch_size = pipeline, batch_size
        self.inputs, self._states = tuple(inputs), tuple(states)


def _instances(nodes: Iterable[Any]) -> list[Any]:
    """Every operator that ``nodes`` depend on, in the order of their definition."""
    found: dict[int, Any] = {}
    waiting = list(nodes)
    while waiting:
        instance = waiting.pop().source
        if instance is not None and instance.id not in found:
            found[instance.id] = instance
            waiting.extend(instance.inputs)
    return [found[number] for number in sorted(found)]


def _fed_name(source: Any) -> str:
    if source._callback is not None or source._autoname:
        raise GraphError(
            "Dali: every external_source is fed by the graph: give it name=FIELD and neither source= nor callbacks"
        )
    return str(source.name)


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise DataError(f"Dali: the pipeline needs a field {name!r}, the batch has {', '.join(fields)}")
    return fields[name]


def _for_dali(value: Any) -> Any:
    """What DALI takes without a copy: arrays in place of CPU tensors and bytes."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.numpy()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, (list, tuple)):
        return [_for_dali(item) for item in value]
    return np.asarray(value) if isinstance(value, (bool, int, float)) else value


def _from_list(result: Any) -> Any:
    if result.is_dense_tensor():
        return from_dlpack(result.as_tensor())
    return [from_dlpack(tensor) for tensor in result]
