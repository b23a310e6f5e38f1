"""Operator parameters as process-independent text, for the graph's digest. Pure."""

from __future__ import annotations

import enum
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import repeat
from types import CoroutineType
from typing import Any, Final

from pipegraph.errors import GraphError, shown

ENTRIES = 1000
"""Lists and mappings that are longer count by their length, as datasets do."""


_PLAIN = str | bytes | bool | int | float | complex | enum.Enum | None


def plain_function(function: Any, what: str, of: str) -> None:
    """Raise GraphError unless a call of ``function`` gives a value at once.

    Args:
        what: the parameter's name, such as ``"Batch: cost"``.
        of: what the function is called with.
    """
    if not callable(function):
        raise GraphError(f"{what} must be a function of {of}, got {shown(function)}")
    for each in (function, getattr(function, "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            raise GraphError(
                f"{what} must be a plain function of {of}, got the async function {function_name(function)}; call it "
                "in a Map before this stage, and use its result here"
            )
        if inspect.isgeneratorfunction(each):
            raise GraphError(
                f"{what} must be a plain function of {of}, got the generator function {function_name(function)}"
            )


UNORDERED: Final = (
    "a set, whose order differs from run to run (PYTHONHASHSEED), so that a resumed run or another rank would get "
    "other items; give sorted(items)"
)


def is_iterator(items: Any) -> bool:
    """Whether it can be read only once."""
    return isinstance(items, Iterator)


def iterator_of(items: Any) -> Iterator[Any]:
    """As ``iter``; but what only answers to indices is asked for ``len`` items, for it may answer to any index."""
    if not hasattr(items, "__iter__") and not hasattr(items, "__getitem__"):
        raise TypeError(f"the function must return an iterable of items, got {type(items).__name__}")
    if isinstance(items, set | frozenset):
        raise TypeError(f"the function returned {UNORDERED}")
    if not hasattr(items, "__iter__") and hasattr(items, "__len__"):
        return map(items.__getitem__, range(len(items)))
    return iter(items)


def without_rewind(items: Iterator[Any]) -> Iterator[Any]:
    """The iterator, of which ``iter`` may be called again: that of a user's own class may begin anew then."""
    return items if type(items).__module__ in ("builtins", "itertools") else map(next, repeat(items))


def names_taken(function: Any) -> Iterable[str]:
    """The names of a function's parameters; none of a builtin without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


def not_awaited(made: CoroutineType[Any, Any, Any]) -> TypeError:
    """The error for a function that makes coroutines; ends this one."""
    made.close()  # else Python warns that nobody awaited it
    return TypeError(
        f"the function returned a coroutine: pass the async function {made.__qualname__} itself to a Map, or wrap the "
        "call in an `async def`, so that the stage awaits it"
    )


def function_name(function: Any) -> str:
    """How a function is known in the graph's digest: module, qualified name, and what ``partial`` has bound."""
    target = inspect.unwrap(function)
    bound = ""
    while isinstance(target, partial):
        given = [*map(_text, target.args), *(f"{k}={_text(v)}" for k, v in sorted(target.keywords.items()))]
        bound += f"({', '.join(given)})"
        target = target.func
    if not hasattr(target, "__qualname__"):
        target = type(target)
    module = getattr(target, "__module__", "?")
    if module in ("__main__", "__mp_main__"):
        module = _main_module(module)
    return f"{module}.{target.__qualname__}{bound}"


def _text(value: Any) -> str:
    """A value as text that is the same in every process: of an object only its type."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    return function_name(value) if callable(value) else type(value).__qualname__


def _main_module(name: str) -> str:
    """The script's name as others import it: a state saved by ``python train.py`` or by a process that it
    spawned (where it is ``__mp_main__``) is then also good for a program that imports ``train``.
    """
    main = sys.modules.get(name)
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return os.path.splitext(os.path.basename(file))[0] if file else "__main__"


def plain_parameters(operator: Any) -> dict[str, str]:
    """The plain values among an operator's attributes: its parameters, if it has no ``config()``.

    Numbers, texts, functions, and lists, tuples, sets and dicts of these. Anything else is left out: what it says of
    itself may differ from process to process.
    """
    found = {name: _parameter(value) for name, value in vars(operator).items()}
    return {name: text for name, text in found.items() if text is not None}


def _parameter(value: Any) -> str | None:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset | dict):
        kind = type(value).__name__
        if len(value) > ENTRIES:
            return f"{kind} of {len(value)}"
        entries: Iterable[Any] = list(value.items()) if isinstance(value, dict) else value
        shown = [text for text in map(_parameter, entries) if text is not None]
        if len(shown) < len(value):
            return f"{kind} of {len(value)}"
        return f"{kind}({', '.join(sorted(shown) if isinstance(value, set | frozenset) else shown)})"
    if inspect.isroutine(value) or isinstance(value, partial | type):
        return function_name(value)
    return None


def length_of(items: Any) -> int | None:
    """How many there are; None where that is not known, which ``len`` may say only when it is asked.

    Each library by an error of its own: torch's DataLoader over an IterableDataset raises TypeError, others
    NotImplementedError, RuntimeError or an AttributeError of what they wrap.
    """
    try:
        return len(items)
    except Exception:
        return None
