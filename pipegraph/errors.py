"""Every exception and warning that pipegraph itself raises.

::

    PipegraphError
    ├── GraphError (ValueError)      the graph is wrong: raised by ``add``, ``plan()`` or ``loader()``
    ├── StateError (ValueError)      a state does not fit the graph it is loaded into
    ├── LoaderClosedError            a pass was used after its end, or a loader after ``close()``
    ├── MemoryLimitError             ``memory_limit`` leaves no way to continue
    ├── MissingExtraError (ImportError)   an optional dependency is not installed, or broken; says the pip line
    ├── BudgetError                  more items of an epoch failed than the stage's policy allows
    ├── WorkerDiedError              a worker process or actor ended unexpectedly
    ├── StageTimeoutError (TimeoutError)  one item took longer than its stage's ``timeout``
    ├── DataError (ValueError)       a sample, file or shard is invalid
    │   ├── DecodeError              encoded bytes cannot be decoded
    │   ├── ShardError               a shard or archive is broken or hostile
    │   ├── ChecksumError            bytes differ from their manifest
    │   └── StoreError (OSError)     a store did not give what was asked for, after all tries
    ├── DeviceError                  a device, stream or slot is used wrongly
    └── ReplicaError                 replicas cannot be built, kept or stepped
    Warning
    └── PipegraphWarning (UserWarning)
        └── StuckWorker              user code did not return; its daemon thread was abandoned

Errors of users' code are never wrapped: they keep their type and traceback,
and get a note (:func:`note`) that names the stage, the sample and its position.
Messages name the stage, the rule, the value and the remedy. This module removes secrets in URLs
from every message and note.

The methods of a user's exceptions and objects (``__str__``, ``__repr__``, ``add_note``) may raise;
:func:`note`, :func:`described` and :func:`shown` never do.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from errno import EMFILE, ENFILE
from importlib import import_module
from typing import Any, Self

# Of URLs only: the XML in which clouds say what was wrong begins with "<?". Elsewhere than in HTTP a "?" may be part of
# a name or a pattern, and a name before an "@" that of a container.
_QUERY = r"((?<![\w+.-])(?:https?://[^\s\"'<>?]*|[A-Za-z][\w+.-]*://[^\s\"'<>?]*(?=\?[^\s/]*=)))\?[^\s\"'<>]*"
_USER = r"(https?://)[^/\s]*@|((?<![\w+.-])[\w+.-]+://)[^/\s:@]*:[^/\s]*@"

_LONGEST = 200  # characters of a user's value in a message


def without_secrets(text: str) -> str:
    """Any text without the queries, user names and passwords of the URLs in it."""
    if "://" not in text:
        return text
    return re.sub(_USER, r"\1\2", re.sub(_QUERY, r"\1?...", text, flags=re.IGNORECASE), flags=re.IGNORECASE)


class _Redacted(Exception):
    def __init__(self, *args: Any) -> None:
        super().__init__(*(without_secrets(each) if isinstance(each, str) else each for each in args))


class PipegraphError(_Redacted):
    """Base of all errors of pipegraph's own."""


class GraphError(PipegraphError, ValueError):
    """A graph, or an option of a stage or loader, is wrong."""


class NotPicklableError(GraphError):
    """An operator cannot be sent to another process."""


class StateError(PipegraphError, ValueError):
    """A state does not fit the graph it is loaded into."""


class LoaderClosedError(PipegraphError, RuntimeError):
    """A pass was used after its end, or a loader after ``close()``."""


class MemoryLimitError(PipegraphError, MemoryError):
    """``memory_limit`` leaves no way to continue."""


class MissingExtraError(PipegraphError, ImportError):
    """An optional dependency is not installed, or cannot be imported.

    Args:
        module: the module that could not be imported.
        extra: the extra of pipegraph that installs it.
        purpose: what needs it, for the message.
        broken: why it cannot be imported, if it is installed.
    """

    def __init__(self, module: str, extra: str, purpose: str, broken: str | None = None) -> None:
        line = install_line(extra)
        super().__init__(
            f"{purpose} needs {module}, which is not installed: {line}"
            if broken is None
            else f"{purpose} needs {module}, which is installed and cannot be imported ({broken}); install what it "
            f"lacks, or install it anew: {line.replace('install', 'install --force-reinstall', 1)}"
        )
        self.extra = extra
        self._given = (module, extra, purpose, broken)

    @classmethod
    def of(
        cls, error: ImportError, module: str, extra: str, purpose: str, package: str | None = None
    ) -> Self:
        """For an ``error`` of importing ``module``; ``package`` is what it comes from, if that has another name.

        It is not installed only where Python did not find it, or a package that it is in: not where something that it
        needs itself is missing.
        """
        found_none = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        return cls(package or module, extra, purpose, None if found_none else str(error))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given  # a copy is made of what was given, not of the message


def extra_module(module: str, extra: str, purpose: str, package: str | None = None) -> Any:
    """A module that an extra of pipegraph installs; ``package`` is what it comes from, if that has another name.

    Raises:
        MissingExtraError: it is not installed, or cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError.of(error, module, extra, purpose, package) from error


class BudgetError(PipegraphError, RuntimeError):
    """At the end of an epoch, a larger share of a stage's items had failed than its policy allows."""


class WorkerDiedError(PipegraphError, RuntimeError):
    """A worker process or actor ended unexpectedly.

    Attributes:
        pid: the process's id; None for an actor.
        status: the exit status, negative for a signal; None if unknown.
    """

    pid: int | None = None
    status: int | None = None


class StageTimeoutError(PipegraphError, TimeoutError):
    """One item took longer than its stage's ``timeout``."""


class DataError(PipegraphError, ValueError):
    """A sample, file or shard is invalid."""


class DecodeError(DataError):
    """Encoded bytes cannot be decoded."""


class ShardError(DataError):
    """A shard or archive is broken or hostile."""


class ChecksumError(DataError):
    """Bytes differ from their manifest."""


class StoreError(DataError, OSError):
    """A store did not give what was asked for, after all tries. Never holds credentials."""


class DeviceError(PipegraphError, RuntimeError):
    """A device, stream or slot is used wrongly."""


class ReplicaError(PipegraphError, RuntimeError):
    """Replicas cannot be built, kept or stepped."""


class PipegraphWarning(_Redacted, UserWarning):
    """Base of pipegraph's warnings."""


class StuckWorker(PipegraphWarning):
    """User code did not return in time; its daemon thread was abandoned."""


def requirements_of(extra: str) -> list[str]:
    """What an extra stands for; nothing where pipegraph runs from its sources, and was not installed."""
    from importlib import metadata  # takes longer than all of this module

    try:
        stated = metadata.requires("pipegraph-torch") or []
    except metadata.PackageNotFoundError:
        stated = []
    parts = (each.replace("'", '"').partition(";") for each in stated)
    return [requirement.strip() for requirement, _, marker in parts if f'extra == "{extra}"' in marker]


def distribution_of(requirement: str) -> str:
    """Its name alone."""
    return re.match(r"[\w.-]*", requirement)[0]  # type: ignore[index]


def install_line(extra: str, distribution: str | None = None) -> str:
    """``pip install`` with what an extra stands for, or with one distribution of it.

    Where pipegraph runs from its sources it is the clone's own line.
    """
    name = "" if distribution is None else distribution.lower()
    wanted = [each for each in requirements_of(extra) if name in ("", distribution_of(each).lower())]
    return "pip install " + (" ".join(f'"{each}"' for each in wanted) or f'-e ".[{extra}]"')


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception, also to one that refuses (a frozen dataclass does)."""
    text = without_secrets(text)
    if type(error) is OSError and error.errno in (EMFILE, ENFILE):
        text += (
            ": no more files may be open (`ulimit -n`). Raise that limit, use fewer workers, or close the files that "
            "your functions and datasets open"
        )
    try:
        error.add_note(text)
    except Exception:
        with contextlib.suppress(Exception):  # its __getattr__ may refuse as well
            found = getattr(error, "__notes__", None)
            notes = [*found, text] if isinstance(found, list) else [text]
            BaseException.__setattr__(error, "__notes__", notes)


def as_raised(error: BaseException, who: str) -> BaseException:
    """The error as it leaves a loader: StopIteration, from ``iter`` or ``next``, would end the user's loop in silence.

    Args:
        who: has raised it, for the message: ``"stage 'x': the function"``.
    """
    if not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    wrapped = RuntimeError(f"{who} raised {type(error).__name__}")
    wrapped.__cause__ = error
    for text in getattr(error, "__notes__", ()):
        wrapped.add_note(text)
    return wrapped


class NeverStops:
    """A block whose errors are :func:`as_raised`."""

    __slots__ = ("_who",)

    def __init__(self, who: str) -> None:
        self._who = who

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and (raised := as_raised(error, self._who)) is not error:
            raise raised


class Naming(NeverStops):
    """As the base class, for a stage's own method: a note names the stage.

    Args:
        where: the note, behind the stage's name.
    """

    __slots__ = ("_note",)

    def __init__(self, stage: str, method: str, where: str) -> None:
        super().__init__(f"stage {stage!r}: {method}")
        self._note = f"pipegraph: stage {stage!r}{where}"

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            note(error, self._note)
        super().__exit__(kind, error, trace)


def described(error: BaseException) -> str:
    """``Type: message`` of an exception, also of one that cannot be printed."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except Exception as failure:
        return f"{kind} (its __str__ raised {type(failure).__name__})"


def shown(value: Any) -> str:
    """The ``repr`` of a user's value, also of one that has none; of a long one the beginning, and how long it is."""
    try:
        whole = repr(value)
        # Before it is cut: half a URL would not be known for one. Of a huge text the beginning: patterns take time.
        text = without_secrets(whole[: 20 * _LONGEST])
        if len(text) <= _LONGEST and len(whole) <= 20 * _LONGEST:
            return text
    except Exception as failure:
        return f"<{type(value).__name__}: its __repr__ raised {type(failure).__name__}>"
    length = f"{len(whole):,} characters"
    with contextlib.suppress(Exception):  # a len() of the user's, or of an array without dimensions
        if isinstance(value, Collection):
            length = f"{len(value):,} {'characters' if isinstance(value, str) else 'in all'}"
    return f"{text[:_LONGEST]}… ({length})"
