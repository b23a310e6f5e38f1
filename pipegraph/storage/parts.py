"""Expands the user's names of shards to a tuple of parts.

A part is named by a path or a URL. ``expand_parts`` accepts a glob
(``train-*.tar``), a folder, a brace range (``part-{00001..16000}.tar``), a
brace list (``{train,val}.tar``), URLs with any of these, and lists of them.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from pipegraph.errors import DataError, StoreError, without_secrets
from pipegraph.paths import broken_link, paths_of

MANIFEST: Final = "_manifest.json"
SETTINGS: Final = "_pack.json"
"""The settings of a pack that is complete."""
JOURNAL: Final = "_pack.json.partial"
"""The settings of a pack that is not complete, locked by the process that writes."""


def unfinished_pack(folder: str) -> str | None:
    """Where the journal of a pack that has not ended lies, if there is one in this folder."""
    path = os.path.join(folder, JOURNAL)
    # A process that was killed behind its last step has written the settings and left the journal.
    ended = not os.path.isfile(path) or os.path.exists(os.path.join(folder, SETTINGS))
    return None if ended else path


def unfinished(folder: str, more: str) -> DataError:
    """The refusal of a folder whose pack has not ended."""
    return DataError(
        f"{folder!r}: the pack into this folder has not ended, it is still running or was stopped, so that shards are "
        f"missing; wait for it, or make the call that began it again{more}: it writes the rest"
    )


if TYPE_CHECKING:
    from .stores import StoreClient

PartsLike = str | os.PathLike[str] | Iterable["str | os.PathLike[str] | Part"]

# Above this a brace pattern is taken for a mistake ({0..1000000000}).
MAX_PARTS = 10_000_000

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")
_RANGE = re.compile(r"^(\d+)\.\.(\d+)$")
_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Part:
    """One shard: a file or an object.

    Args:
        uri: a local path as the user gave it, or a URL.
        size: bytes, or None where nobody has asked the store yet.
        version: identifies these bytes under their name, where that is known: an object's etag, a file's
            inode, modification and change time. Part of what is read, not of what the part is: parts are equal
            without it.
    """

    uri: str
    size: int | None = None
    version: str | None = field(default=None, compare=False)

    @property
    def is_local(self) -> bool:
        return not is_url(self.uri)

    @property
    def name(self) -> str:
        """The last component of the path, without a URL's query."""
        path = self.uri
        if path.startswith(("http://", "https://")):
            path = urlsplit(path).path  # elsewhere "?" and "#" are characters like others
        return path.rstrip("/").rsplit("/", 1)[-1]


def file_version(status: os.stat_result) -> str:
    """The `Part.version` of a local file: inode, modification time, change time, which shows a write before a `touch`.

    A link or a change of mode moves the last too: what only reads again for it may go by it; an error by
    `written_again`.
    """
    return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_ctime_ns}"


def written_again(version: str, status: os.stat_result) -> bool:
    """Whether a local file is another one than that of this version, or was written to since."""
    return version.split("-")[:2] != file_version(status).split("-")[:2]


def _local(path: str, status: os.stat_result) -> Part:
    return Part(path, status.st_size, file_version(status))


def is_url(text: str) -> bool:
    """Whether `text` names a remote object (``file://`` is local)."""
    return bool(_SCHEME.match(text)) and not text.lower().startswith("file://")


def expand_parts(parts: PartsLike, *, store: StoreClient | None = None) -> list[Part]:
    """The parts that `parts` names, in the order given; globs and folders sorted by name.

    Args:
        store: lists URLs (globs, and folders, which end in ``/``); else one is made from the environment.

    Raises:
        GraphError: a name is no path.
        DataError: nothing matches, a file is missing, a pattern is malformed, a folder's shards have different formats,
            or the pack into it has not ended; names the pattern and the folder.
    """
    found: list[Part] = []
    complete = set[str]()

    def check(folder: str) -> None:
        if folder not in complete:
            if unfinished_pack(folder) is not None:
                raise unfinished(folder, "")
            complete.add(folder)

    names = paths_of(parts, "parts", Part)
    for name in [names] if isinstance(names, str) else names:
        if isinstance(name, Part):
            found.append(name)
            continue
        if not is_url(name):  # before it is listed: a pack may end meanwhile
            path = local_path(name)
            check(path if os.path.isdir(path) else os.path.dirname(path) or ".")
        named = list(_expand_one(name, store))
        for folder in {os.path.dirname(part.uri) or ".": None for part in named if part.is_local}:
            check(folder)
        found += named
    if not found:
        raise DataError("parts: expected at least one shard, got an empty list")
    return found


def expand_braces(pattern: str) -> Iterator[str]:
    """Every name a pattern with ``{a..b}`` and ``{x,y}`` stands for.

    Zero padding follows the first bound: ``{001..10}`` counts ``001`` to ``010``.
    """
    pieces = _BRACES.split(pattern)
    literals, groups = pieces[0::2], [_alternatives(pattern, body) for body in pieces[1::2]]
    if any(c in piece for piece in literals for c in "{}"):
        raise DataError(f"parts {pattern!r}: braces must be closed and must not be nested")
    count = math.prod(map(len, groups))
    if count > MAX_PARTS:
        raise DataError(f"parts {pattern!r}: names {count} parts, more than {MAX_PARTS}; is the range meant?")
    for choice in itertools.product(*groups):
        yield literals[0] + "".join(a + b for a, b in zip(choice, literals[1:], strict=True))


def _alternatives(pattern: str, body: str) -> list[str]:
    bounds = _RANGE.match(body)
    if bounds:
        start, stop = int(bounds[1]), int(bounds[2])
        if stop < start:
            raise DataError(
                f"parts {pattern!r}: the range {{{body}}} runs backwards; write {{{stop}..{start}}}"
            )
        if stop - start >= MAX_PARTS:
            raise DataError(f"parts {pattern!r}: {{{body}}} names more than {MAX_PARTS} parts")
        return [f"{number:0{len(bounds[1])}d}" for number in range(start, stop + 1)]
    if "," in body:
        return body.split(",")
    raise DataError(f"parts {pattern!r}: {{{body}}} is neither a range {{0..9}} nor a list {{a,b}}")


def has_magic(pattern: str) -> bool:
    """Whether a name is a glob. In HTTP a "?" begins a query."""
    if is_url(pattern):
        return any(c in pattern for c in ("*[" if pattern.startswith(("http://", "https://")) else "*[?"))
    return glob.has_magic(pattern)


def local_path(name: str) -> str:
    """The path that a name of a local file, which may be a ``file://`` URL, stands for."""
    if name.lower().startswith("file://"):
        return unquote(re.sub("^file://[^/]*", "", name, flags=re.IGNORECASE))
    return name


def _expand_one(pattern: str, store: StoreClient | None) -> Iterator[Part]:
    if is_url(pattern):
        yield from _expand_url(pattern, store)
        return
    pattern = local_path(pattern)
    # A file of exactly this name is meant, whatever characters are in it.
    if os.path.isfile(pattern):
        yield _local(pattern, os.stat(pattern))
    elif os.path.isdir(pattern):
        yield from _folder(pattern)
    else:
        for name in expand_braces(pattern):
            if glob.has_magic(name):
                yield from _glob(name)
            else:
                yield _named(name, pattern)


def _named(path: str, pattern: str) -> Part:
    try:
        status = os.stat(path)
    except OSError as error:
        folder, name = os.path.split(path.rstrip("/" + os.sep))
        raise DataError(
            f"parts {pattern!r}: no shard {name!r} in folder {folder or '.'!r} ({error.strerror})"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"parts {pattern!r}: {path!r} is no file (a folder, a pipe or a device)")
    return _local(path, status)


def _refuse_broken(pattern: str, path: str) -> None:
    """Raises DataError for a link that leads nowhere: what it stands for would be missing unseen."""
    target = broken_link(path)
    if target is not None:
        raise DataError(
            f"parts {pattern!r}: {path!r} is a link to {target!r}, which is not there or cannot be reached; mend the "
            "link, or remove it"
        )


def _glob(pattern: str) -> Iterator[Part]:
    found = sorted(glob.iglob(pattern, recursive=True))
    paths = [path for path in found if os.path.isfile(path)]
    if len(paths) < len(found):
        for path in found:
            _refuse_broken(pattern, path)
    if not paths:
        folder = os.path.dirname(pattern) or "."
        raise DataError(
            f"parts {pattern!r}: no file matches {os.path.basename(pattern)!r} in folder {folder!r}"
        )
    for path in paths:
        yield _local(path, os.stat(path))


def _folder(folder: str) -> Iterator[Part]:
    from .formats import check_folder, known_suffixes  # formats import Part

    suffixes = known_suffixes()
    with os.scandir(folder) as entries:
        named = sorted((e for e in entries if is_shard_name(e.name, suffixes)), key=lambda e: e.name)
    for entry in named:
        if entry.is_symlink():
            _refuse_broken(folder, entry.path)
    files = [entry for entry in named if entry.is_file()]
    check_folder(folder, [entry.name for entry in files])
    if not files:
        raise DataError(
            f"parts {folder!r}: no shard ({', '.join(suffixes)}) in folder {folder!r}; for those of its subfolders "
            f"write {os.path.join(folder, '**', '*.tar')!r}, for a folder of images ops.ListFiles"
        )
    for entry in files:
        yield _local(entry.path, entry.stat())


def is_shard_name(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file of a folder is taken for a shard: hidden ones, which globs leave out too, are none."""
    return name.lower().endswith(suffixes) and not name.startswith(".")


def _expand_url(pattern: str, store: StoreClient | None) -> Iterator[Part]:
    for url in expand_braces(pattern):
        if not (url.endswith("/") or has_magic(url)):
            yield Part(url, None)
        else:
            from .stores import StoreClient  # stores import Part

            with nullcontext(store) if store is not None else StoreClient() as client:
                yield from _listed(url, client)


def _listed(url: str, store: StoreClient) -> list[Part]:
    from .formats import check_folder, known_suffixes  # formats import Part

    beside = (JOURNAL, SETTINGS)
    listed = store.list(url, beside)
    found = [part for part in listed if part.name not in beside]
    if url.endswith("/"):
        suffixes = known_suffixes()
        # What lies beside shards, such as their manifest, is none.
        found = [part for part in found if is_shard_name(part.name, suffixes)]
        check_folder(url, [part.name for part in found])
        if not found:
            raise DataError(f"parts {url!r}: no shard ({', '.join(suffixes)}) among its objects")
    uris = {part.uri for part in listed}
    for folder in dict.fromkeys(part.uri.rpartition("/")[0] for part in found):
        if f"{folder}/{JOURNAL}" in uris and f"{folder}/{SETTINGS}" not in uris:
            raise unfinished(folder, ", and upload all of it")
    return found


def split_url(url: str) -> tuple[str, str]:
    """(store, key) of a URL: ``s3://bucket`` and ``a/b.tar``."""
    scheme, _, rest = url.partition("://")
    host, _, key = rest.partition("/")
    if url != _without_query(url) or (scheme in ("http", "https") and "@" in host):
        raise DataError(
            f"part {safe_url(url)!r}: URLs with a query or a password are not supported; "
            "give credentials as store options"
        )
    return f"{scheme}://{host}", unquote(key) if scheme in ("http", "https") else key


def safe_url(url: str) -> str:
    """A URL for messages: without a query, user name or password, which may be secrets."""
    return without_secrets(_without_query(url))


def _without_query(url: str) -> str:
    # Elsewhere than in HTTP a "?" may be part of a name or a pattern.
    http = url.startswith(("http://", "https://"))
    return re.split(r"\?" if http else r"\?[^/]*=", url, maxsplit=1)[0]


def endpoints(options: Mapping[str, Any]) -> list[str]:
    """Where requests go, as options and the clouds' environment say: to plain HTTP only where someone asked for it."""
    clouds = {
        name: value for name, value in os.environ.items() if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))
    }
    found = {name: str(v) for name, v in {**clouds, **options}.items() if "endpoint" in name.lower()}
    for name, url in found.items():
        if name in options and "://" not in url:
            raise StoreError(
                f"store option {name!r}: must be a whole URL such as https://host:9000, got "
                f"{url.rpartition('@')[2]!r}"
            )
    return list(found.values())


def glob_regex(glob: str) -> str:
    """As a shell's: ``*`` and ``?`` stop at ``/``, ``**/`` does not."""
    text = fnmatch.translate(glob.replace("**/", "\0").replace("*", "\1").replace("?", "\2"))
    return text.replace("\0", "(?:.*/)?").replace("\1", "[^/]*").replace("\2", "[^/]")
