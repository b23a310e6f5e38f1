"""Removes what may be secret from texts: the queries, user names and passwords of URLs."""

from __future__ import annotations

import re


def without_secrets(text: str) -> str:
    """Any text without the queries, user names and passwords of the URLs in it."""
    if "://" not in text:
        return text
    return re.sub(_USER, r"\1\2", re.sub(_QUERY, r"\1?...", text, flags=re.IGNORECASE), flags=re.IGNORECASE)


# Of URLs only: the XML in which clouds say what was wrong begins with "<?". Elsewhere than in HTTP a "?" may be part of
# a name or a pattern, and a name before an "@" that of a container.
_QUERY = r"((?<![\w+.-])(?:https?://[^\s\"'<>?]*|[A-Za-z][\w+.-]*://[^\s\"'<>?]*(?=\?[^\s/]*=)))\?[^\s\"'<>]*"
_USER = r"(https?://)[^/\s]*@|([\w+.-]+://)[^/\s:@]*:[^/\s]*@"
