"""Parses URLs of objects."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from pipegraph.errors import DataError, StoreError, without_secrets


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
