"""Sends exceptions between processes, with their type and the text of their traceback."""

from __future__ import annotations

import inspect
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from pipegraph.engine.remote.by_value import dumps_back
from pipegraph.errors import described


class RemoteTraceback(Exception):
    """The traceback of an error in a worker process, as text; the cause of the error that is raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class Carried:
    """An exception in a message.

    It is rebuilt from its class, ``args`` and attributes, without its ``__init__``, which may need other arguments; so
    are the exceptions of a group, and those among args and attributes. An attribute that cannot be pickled is left out;
    an exception whose class cannot be pickled arrives as a ``RuntimeError`` with its name and text.
    ``within`` are the exceptions that contain it.
    """

    __slots__ = ("_pickled", "_text", "_what")

    def __init__(self, error: BaseException, within: tuple[BaseException, ...] = ()) -> None:
        self._text = "".join(_formatted(error))
        self._what = described(error)
        self._pickled = _dumped(error, (*within, error))

    def error(self) -> BaseException:
        """The exception, with the worker's traceback as its cause."""
        try:
            error = _made(*pickle.loads(self._pickled))
        except Exception:
            error = RuntimeError(self._what)
        if error.__cause__ is None:
            object.__setattr__(error, "__cause__", RemoteTraceback(self._text))
        return error


def copied(error: BaseException) -> BaseException:
    """A copy of the exception, with its traceback and cause; notes added to one do not show in the other."""
    attributes = {**_slots(error), **getattr(error, "__dict__", {})}
    notes = list(attributes.pop("__notes__", ()))
    try:
        fresh = _made(type(error), error.args, attributes, notes)
        object.__setattr__(fresh, "__cause__", error.__cause__)
    except Exception:  # its class rejects its own attributes
        return error
    return fresh.with_traceback(error.__traceback__)


def _made(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any], notes: list[str] | None
) -> BaseException:
    """Rebuild an exception without its ``__init__``, which may need other arguments than ``args``."""
    if issubclass(kind, BaseExceptionGroup):
        args = (args[0], [_arrived(each) for each in args[1]])
    args = tuple(map(_arrived, args))
    attributes = {name: _arrived(value) for name, value in attributes.items()}
    try:
        error: BaseException = kind.__new__(kind, *args)
    except TypeError:  # with two built-in bases, the second one's __new__ differs (MemoryError)
        error = BaseException.__new__(kind, *args)
    if notes:
        attributes = {**attributes, "__notes__": notes}
    for name, value in {"args": args, **attributes}.items():
        object.__setattr__(error, name, value)  # a frozen dataclass rejects plain assignment
    return error


def _arrived(value: object) -> Any:
    return value.error() if isinstance(value, Carried) else value


def _formatted(error: BaseException) -> list[str]:
    try:
        return traceback.format_exception(error)
    except Exception:  # its __str__ raises
        return [*traceback.format_tb(error.__traceback__), type(error).__qualname__]


def _repr_of(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__qualname__}"


def _dumped(error: BaseException, within: tuple[BaseException, ...]) -> bytes:
    def sent(value: object, otherwise: Callable[[object], object]) -> object:
        if _can(value):
            return value
        if isinstance(value, BaseException) and not any(value is each for each in within):
            return Carried(value, within)
        return otherwise(value)

    left = object()
    attributes = {**_slots(error), **getattr(error, "__dict__", {})}
    notes = attributes.pop("__notes__", None)
    attributes = {name: sent(value, lambda _: left) for name, value in attributes.items()}
    kept = {name: value for name, value in attributes.items() if value is not left}
    if isinstance(error, BaseExceptionGroup):
        args: tuple[object, ...] = (error.message, [Carried(each, within) for each in error.exceptions])
    else:
        args = tuple([sent(each, _repr_of) for each in error.args])
    try:
        return dumps_back((type(error), args, kept, notes))
    except Exception:
        return b""


def _slots(error: BaseException) -> dict[str, object]:
    """Fields in slots: those of built-in exceptions, which only ``__init__`` sets, and of ``__slots__``."""
    found = {}
    for kind in type(error).__mro__:
        # A group's are read-only, and set from args. An AttributeError's ``obj`` may be the whole dataset.
        if kind in (BaseException, BaseExceptionGroup, object):
            continue
        for name, slot in vars(kind).items():
            if inspect.ismemberdescriptor(slot) and not (kind is AttributeError and name == "obj"):
                value = getattr(error, name, None)
                if value is not None:
                    found[name] = value
    return found


def _can(value: object) -> bool:
    try:
        pickle.loads(cloudpickle.dumps(value))  # an exception's class may reject its args
    except Exception:
        return False
    return True
