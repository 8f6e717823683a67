"""Reasoning as an opaque string that a client keeps and sends back unread.

It is no secret, and nothing trusts it: who changes it changes no more than the history of a request that is theirs anyway.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "ds4batch.1."  # what other servers made is told apart by it


def seal(text: str) -> str:
    """The string for a text."""
    return _MARK + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(value: str) -> str | None:
    """The text of a string that `seal` made, None for any other."""
    if not value.startswith(_MARK):
        return None
    try:
        return base64.b64decode(value[len(_MARK) :].encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None
