"""What to do about errors of stores: whether and when to try again, and what to tell the user. Pure."""

from __future__ import annotations

import errno
import random
import re
from dataclasses import dataclass

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
_CAUSE = re.compile(r'(?:message|error): "([^"\n]+)"|InvalidCertificate')

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


def plain(error: Exception, url: str, more: str) -> StoreError | DataError:
    """An error for users: what happened, without the client's own debug output and secrets."""
    if isinstance(error, ShardError | DataError):
        return error
    text, _, details = (str(error) or error.__doc__ or type(error).__name__).partition("\n\nDebug source")
    text = text.strip()
    if "error sending request" in text and (causes := list(_CAUSE.finditer(details))):
        text += f" ({causes[-1][1] or causes[-1][0]})"
    if _METADATA.search(text):
        more += (
            ". No credentials were found: set the cloud's environment variables, give them as store options, or "
            "skip_signature=True for public data"
        )
    found = StoreError(f"{safe_url(url)}: {text}{more}")
    if isinstance(error, FileNotFoundError):
        found.errno = errno.ENOENT
    return found
