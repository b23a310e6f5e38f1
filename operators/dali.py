"""``Dali``: a whole NVIDIA DALI pipeline, or a function of its dynamic mode, as a stage.

A static pipeline is made once per worker. Each of its random operators is given
its state as an input (DALI's own ``_random_state`` argument, which its dynamic
mode uses), filled for every chunk from the generator of that chunk: what is
delivered depends on nothing that ran before, so that a resume is exact. A
dynamic function gets an ``ndd.random.RNG`` seeded for the chunk.

Arrays go in as they are: a pipeline's CPU inputs are fed with ``no_copy``, which
DALI would not do by itself, and a function's batches wrap them. The caller holds
them until the outputs are there, which is when DALI has read them. Outputs come
out through DLPack, in DALI's own memory, which is not written again while anybody
holds them: DALI's dynamic executor counts references, and no other is used here.

What DALI copies all the same: an input that a pipeline returns as it came, or
reshaped (its outputs are always its own memory); inputs for the GPU; and in
dynamic mode samples that lie apart and are returned untouched, when they are
put together to one tensor.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
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
                f"Dali: a @pipeline_def function or a function on ndd batches is needed, got {shown(pipeline_def)}"
            )
        if isinstance(outputs, str) or not outputs:
            raise GraphError(f"Dali: outputs must be a sequence of names, got {shown(outputs)}")
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


Fields = Mapping[str, Any]

_STATE_WORDS = 7
"""uint32 words of one DALI random state (25 bytes)."""


class DaliError(DataError):
    """DALI could not process a chunk; ``index`` is the place in it of the sample that fails by itself."""

    def __init__(self, message: str, index: int | None) -> None:
        super().__init__(message)
        self.index = index


class DaliRunner(ABC):
    """Runs one chunk at a time, for one worker; ``inputs`` are the fields that the definition names."""

    inputs: tuple[str, ...] = ()

    def run(self, fields: Fields, count: int, rng: np.random.Generator) -> dict[str, Any]:
        """Process one chunk of ``count`` samples, whose generator is ``rng``; blocks until its outputs are there.

        They are, by name, a tensor (count, ...) where all samples have one shape, else a list of tensors.
        """
        inputs = {name: _for_dali(_field(fields, name)) for name in self.inputs}
        try:
            return self._run(inputs, count, rng)
        except RuntimeError as error:
            raise _failure(error, _culprit(self._run, inputs, count)) from error

    @abstractmethod
    def _run(self, inputs: Fields, count: int, rng: np.random.Generator) -> dict[str, Any]:
        """One chunk of ``count`` samples."""

    @abstractmethod
    def close(self) -> None:
        """End DALI's threads. Idempotent."""


def open_dali(
    definition: Callable[..., Any],
    outputs: Sequence[str] = ("image",),
    *,
    num_threads: int = 1,
    device_id: int | None = None,
) -> DaliRunner:
    """A runner for what ``definition`` is; the arguments are those of ``Dali``.

    A function in DALI's dynamic mode returns one batch, a tuple of them, or a dict by name, which needs no ``outputs``.
    """
    extra_module("nvidia.dali", "dali", "Dali", "nvidia-dali-cuda130")
    if getattr(definition, "_is_pipeline_def", False):
        return StaticRunner(definition, outputs, num_threads, device_id)
    return DynamicRunner(definition, outputs, num_threads, device_id)


class StaticRunner(DaliRunner):
    """A ``@pipeline_def`` pipeline."""

    def __init__(
        self, definition: Callable[..., Any], outputs: Sequence[str], num_threads: int, device_id: int | None
    ) -> None:
        self._definition = partial(definition, num_threads=num_threads, device_id=device_id)
        self._outputs = tuple(outputs)
        self._batch_size = 0
        self._pipeline: Any = None
        self._states: tuple[str, ...] = ()
        self._build(1)  # an unfit definition is found here and not at the first chunk

    def _run(self, inputs: Fields, count: int, rng: np.random.Generator) -> dict[str, Any]:
        if self._pipeline is None or count > self._batch_size:
            self._build(max(count, self._batch_size))
        feed = dict(inputs)
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


class DynamicRunner(DaliRunner):
    """A function on ``nvidia.dali.experimental.dynamic`` batches."""

    def __init__(
        self, function: Callable[..., Any], outputs: Sequence[str], num_threads: int, device_id: int | None
    ) -> None:
        import nvidia.dali.experimental.dynamic as ndd

        self._ndd: Any = ndd
        self._function = function
        self._outputs = tuple(outputs)
        names = list(inspect.signature(function).parameters)
        self._wants_rng = "rng" in names
        self.inputs = tuple(name for name in names if name != "rng")
        if not self.inputs:
            raise GraphError("Dali: the function's parameters name the fields that it gets, and it has none")
        self._context: Any = ndd.EvalContext(num_threads=num_threads, device_id=device_id)

    def _run(self, inputs: Fields, count: int, rng: np.random.Generator) -> dict[str, Any]:
        ndd = self._ndd
        batches = {name: ndd.as_batch(value) for name, value in inputs.items()}
        seed, default_seed = (int(word) for word in rng.integers(0, 2**63, 2))
        if self._wants_rng:
            batches["rng"] = ndd.random.RNG(seed=seed)
        with self._context:
            # What is drawn without rng= is keyed too: the default generator belongs to this thread.
            ndd.random.set_seed(default_seed)
            result = self._named(self._function(**batches))
            return {name: _from_batch(batch) for name, batch in result.items()}

    def close(self) -> None:
        self._context = None

    def _named(self, result: Any) -> dict[str, Any]:
        if isinstance(result, dict):
            return result
        results = result if isinstance(result, tuple) else (result,)
        if len(results) != len(self._outputs):
            raise GraphError(
                f"Dali: the function returned {len(results)} outputs, but outputs={self._outputs}"
            )
        return dict(zip(self._outputs, results, strict=True))


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


def _field(fields: Fields, name: str) -> Any:
    if name not in fields:
        raise GraphError(
            f"Dali: the definition needs a field {name!r}, the chunk has {', '.join(sorted(fields))}"
        )
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


def _from_batch(batch: Any) -> Any:
    tensors = [from_dlpack(tensor) for tensor in batch.tensors]
    if len({tensor.shape for tensor in tensors}) != 1:
        return tensors
    import nvidia.dali.experimental.dynamic as ndd

    return from_dlpack(ndd.as_tensor(batch))


def _culprit(
    run: Callable[[Fields, int, np.random.Generator], dict[str, Any]], inputs: Fields, count: int
) -> int | None:
    """The first sample that fails alone. DALI does not say: its decoders fail for the whole batch."""
    for index in range(count):
        sample = {name: value[index : index + 1] for name, value in inputs.items()}
        try:
            run(sample, 1, np.random.default_rng(0))
        except RuntimeError:
            return index
    return None


def _failure(error: RuntimeError, index: int | None) -> DaliError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("Critical error", "Current pipeline"))]
    place = "" if index is None else f"sample {index} of the chunk: "
    return DaliError(f"DALI: {place}{' '.join(kept)}", index)
