"""What to do about errors and slowness of stores: whether a retry may help, when to retry and to hedge, and what to
tell the user. Pure.

Times are seconds on any clock that only grows; callers pass them in.
"""

from __future__ import annotations

import errno
import random
import re
from collections import deque
from dataclasses import dataclass
from typing import Final

from pipegraph.errors import DataError, ShardError, StoreError
from pipegraph.storage.urls import safe_url


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with full jitter, inside a deadline.

    Full jitter (a delay drawn from zero to the bound) spreads the clients that one
    outage hit at once; see Brooker, "Exponential Backoff And Jitter", AWS, 2015.

    Args:
        deadline_s: after this no further try begins, for a transfer without bytes;
            each byte adds its time at `min_rate`.
        first_s, max_s: bound of the first and of any delay.
        min_rate: bytes per second.
    """

    deadline_s: float = 120.0
    first_s: float = 0.1
    max_s: float = 10.0
    min_rate: float = 64_000.0

    def delay(self, failures: int, elapsed_s: float, nbytes: int, draw: float) -> float | None:
        """Seconds to wait before the next try, or None to give up.

        Args:
            failures: so far, at least 1; those before the last progress do not count.
            draw: uniform in [0, 1).
        """
        bound = min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 60))
        delay = draw * bound
        deadline = self.deadline_s + nbytes / self.min_rate
        return delay if elapsed_s + delay < deadline else None


class Hedge:
    """Decides when a second, equal request is worth its cost. Not thread-safe.

    As in Dean and Barroso, "The Tail at Scale", 2013: after the 95th percentile of what requests took; and of at most
    one in twenty, so that an overloaded store is not loaded further.
    """

    WINDOW: Final = 128
    NEEDED: Final = 16
    MAX_SHARE: Final = 0.05

    def __init__(self, min_s: float = 0.05) -> None:
        self._least = min_s
        self._took: deque[float] = deque(maxlen=self.WINDOW)
        self._requests = self._hedges = 0

    def finished(self, took_s: float) -> None:
        """A request was answered."""
        self._requests += 1
        self._took.append(took_s)

    def after(self) -> float | None:
        """Seconds after which to ask again, or None where that is not known or not allowed."""
        if len(self._took) < self.NEEDED or not self._is_allowed():
            return None
        ordered = sorted(self._took)
        return max(self._least, ordered[int(0.95 * len(ordered))])

    def take(self) -> bool:
        """Whether a second request may be sent now; it counts as sent.

        Asked when the time has come: of many requests that wait at the same moment most may not.
        """
        if not self._is_allowed():
            return False
        self._hedges += 1
        return True

    def _is_allowed(self) -> bool:
        return self._hedges < 1 + self.MAX_SHARE * self._requests


def jitter() -> float:
    """A draw for `Backoff.delay`, never seeded: ranks that fail together must not draw the same delays."""
    return random.SystemRandom().random()


class Stalled(Exception):
    """fewer bytes per second than the least rate"""


class ClosedEarly(Exception):
    """the connection ended before its time"""


class WrongRange(Exception):
    """the server answered with another range than the one asked for"""


_STATUS = re.compile(r"status code: (\d{3})")

# Requests that cannot even be sent, servers that are not who they should be or speak no HTTP, and redirects without an
# end or to nowhere (S3's to another region): they stay so.
_HOPELESS = re.compile(
    r"builder error|InvalidCertificate|InvalidContentType|TooManyRedirects|BareRedirect|hyper::Error\(\s*Parse\("
    r"|status code: 501|Error decoding PROPFIND"  # of servers without WebDAV
)

# What is said beside the client's own words, which name no cause.
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*((?:Other\(\s*OtherError\(\s*)?\w+)")
_CAUSE = re.compile(r'(?:message|error): "([^"\n]+)"')
_PLAIN_URL = re.compile(r"http://(?:[^/\s@]*@)?([^/\s:]+):?(\d*)")

# What web servers that do not list folders answer to the request for it.
_NO_WEBDAV = re.compile(
    r"PROPFIND .*status code: ((?:4(?!08|29)\d\d|501)[\w ]*)|Error decoding PROPFIND", re.DOTALL
)
NO_LISTING: Final = (
    "web servers list files by WebDAV only (PROPFIND): where one has none, name the parts by a brace range "
    "(part-{00..99}.tar) or a list of URLs"
)

# Where clouds keep their machines' credentials: asked last, when none were found before.
_METADATA = re.compile(r"169\.254\.169\.254|metadata\.google\.internal")


def is_passing(error: Exception, generic: type[Exception]) -> bool:
    """Whether the same request may well succeed later: server errors and broken connections."""
    if isinstance(error, Stalled | ClosedEarly | TimeoutError):
        return True
    if not isinstance(error, generic | ConnectionError):
        return False
    # The client has one class for a server that is down and for a request that is wrong (HTTP 400, 416, 429, 503 and
    # a refused connection alike); to leave the tries to it would hide them from the profile and from our time limits.
    status = _STATUS.search(str(error))
    asks_again = status is None or status[1] in ("408", "429") or status[1].startswith("5")
    return asks_again and not _METADATA.search(str(error)) and not _HOPELESS.search(str(error))


def unanswered_plain(error: Exception) -> tuple[str, int] | None:
    """Host and port of a plain HTTP request whose connection ended without an answer: maybe the port speaks TLS."""
    found = _PLAIN_URL.search(str(error))
    # A server that is surprised by it resets the connection, or ends it.
    if found is None or not any(end in str(error) for end in ("Interrupted", "IncompleteMessage")):
        return None
    return found[1], int(found[2] or 80)


def plain(error: Exception, url: str, more: str) -> StoreError | DataError:
    """An error for users: what happened, without the client's own debug output and secrets."""
    if isinstance(error, ShardError | DataError):
        return error
    text, _, details = (str(error) or error.__doc__ or type(error).__name__).partition("\n\nDebug source")
    text = text.strip()
    if certificate := _CERTIFICATE.search(details):
        reason = re.split(r"[^A-Za-z]+", certificate[1])[-1]
        more += (
            f". The server's certificate is not valid ({reason}): mend it, or trust its authority with the store "
            "option client_options={'root_certificate': ...}"
        )
    elif unlisted := _NO_WEBDAV.search(text):
        text = (
            f"the server does not list this folder ({unlisted[1] or 'it answers with a page'}); {NO_LISTING}"
        )
    elif "error sending request" in text and (causes := _CAUSE.findall(details)):
        text += f" ({causes[-1]})"
    if _METADATA.search(text):
        more += (
            ". No credentials were found: set the cloud's environment variables, give them as store options, or "
            "skip_signature=True for public data"
        )
    if "redirect" in text:
        more += ". Are the store options endpoint and region right?"
    if "builder error" in text:
        more += ". Is the endpoint a whole URL, such as https://host:9000?"
    found = StoreError(f"{safe_url(url)}: {text}{more}")
    if isinstance(error, FileNotFoundError):
        found.errno = errno.ENOENT
    return found
