"""The standard operators, imported as ``pipegraph.operators``."""

if __name__ != "pipegraph.operators":
    raise ImportError("import pipegraph.operators: the top-level folder 'operators' is not a module")

import copyreg
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from pipegraph.importing import lazy_names

if TYPE_CHECKING:
    from pipegraph.operators.batching import Batch as Batch, Unbatch as Unbatch
    from pipegraph.operators.cache import Cache as Cache
    from pipegraph.operators.dali import Dali as Dali
    from pipegraph.operators.decode import DecodeImage as DecodeImage
    from pipegraph.operators.from_iterable import FromIterable as FromIterable
    from pipegraph.operators.from_sequence import FromSequence as FromSequence
    from pipegraph.operators.functions import Filter as Filter, FlatMap as FlatMap, Map as Map
    from pipegraph.operators.images.crop import (
        CenterCrop as CenterCrop,
        RandomResizedCrop as RandomResizedCrop,
    )
    from pipegraph.operators.list_files import ListFiles as ListFiles
    from pipegraph.operators.load import Load as Load
    from pipegraph.operators.merging import (
        Concat as Concat,
        Merge as Merge,
        Mix as Mix,
        Route as Route,
        Take as Take,
        Zip as Zip,
    )
    from pipegraph.operators.normalize import Normalize as Normalize
    from pipegraph.operators.packing import Pack as Pack
    from pipegraph.operators.padding import Pad as Pad
    from pipegraph.operators.shards import ShardSelect as ShardSelect
    from pipegraph.operators.tables import FromTable as FromTable, FromTokens as FromTokens
    from pipegraph.operators.to_device import CopyToDevice as CopyToDevice, Pin as Pin, Scatter as Scatter
    from pipegraph.operators.windows import Bucket as Bucket, Shuffle as Shuffle


def _torch_ops(module: Any) -> tuple[Any, ...]:
    return import_module, ("torch.ops",)


# For cloudpickle, Ray's too, a function that uses torch and a name ``ops`` uses torch.ops: a module of a class of its
# own, which it cannot pickle.
copyreg.pickle(type(torch.ops), _torch_ops)

# Imported at first use: a pipeline waits for the operators that it uses, not for those it does not.
_MODULES = {
    "batching": "Batch Unbatch",
    "cache": "Cache",
    "dali": "Dali",
    "decode": "DecodeImage",
    "functions": "Filter FlatMap Map",
    "images.crop": "CenterCrop RandomResizedCrop",
    "list_files": "ListFiles",
    "load": "Load",
    "merging": "Concat Merge Mix Route Take Zip",
    "normalize": "Normalize",
    "packing": "Pack",
    "padding": "Pad",
    "shards": "ShardSelect",
    "from_iterable": "FromIterable",
    "from_sequence": "FromSequence",
    "tables": "FromTable FromTokens",
    "to_device": "CopyToDevice Pin Scatter",
    "windows": "Bucket Shuffle",
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULES)
