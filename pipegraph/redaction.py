"""Removes what may be secret from texts: the queries, user names and passwords of URLs."""

from __future__ import annotations

import re


def without_secrets(text: str) -> str:
    """Any text without the queries, user names and passwords of the URLs in it."""
    return _USER.sub(r"\1\2", _QUERY.sub(r"\1?...", text)) if "://" in text else text


# Of URLs only: the XML in which clouds say what was wrong begins with "<?". Elsewhere than in HTTP a "?" may be part of
# a name or a pattern, and a name before an "@" that of a container.
_QUERY = re.compile(
    r"((?<![\w+.-])(?:https?://[^\s\"'<>?]*|[A-Za-z][\w+.-]*://[^\s\"'<>?]*(?=\?[^\s/]*=)))\?[^\s\"'<>]*",
    re.IGNORECASE,
)
_USER = re.compile(r"(https?://)[^/\s]*@|([\w+.-]+://)[^/\s:@]*:[^/\s]*@", re.IGNORECASE)
