"""Store errors: whether a retry may help, and their messages."""

from __future__ import annotations

import errno
import re

from pipegraph.errors import DataError, ShardError, StoreError

from .urls import safe_url


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
)

# What is said beside the client's own words, which name no cause.
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*((?:Other\(\s*OtherError\(\s*)?\w+)")
_CAUSE = re.compile(r'(?:message|error): "([^"\n]+)"')
_PLAIN_URL = re.compile(r"http://(?:[^/\s@]*@)?([^/\s:]+):?(\d*)")

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
    if found is None or "Interrupted" not in str(error):
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
