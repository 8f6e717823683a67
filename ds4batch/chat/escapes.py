"""How data is written inside markup so that it cannot close it, and read back. Pure functions of text; knows no grammar.

A body is everything up to its closing tag, and is no HTML: `a < b && c` stands in it as it is. Only its own closing tag is
disguised, and what would be taken for a disguise.
"""

from __future__ import annotations

import functools
import re

_NAMED = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'"}
_ENTITY = re.compile("|".join(_NAMED))


def escape(text: str, end: str) -> str:
    """`text` as the body of an element that `end` closes. The result does not contain `end`.

    A closing tag loses its "<" to "&lt;"; a closing tag that is so disguised already, however often, gets one more "amp;".
    Nothing else changes. Raises ValueError for an `end` that does not begin with its only "<", or has a "&".
    """
    if end[1:] not in text:
        return text
    return _open(end).sub(lambda found: "&lt;" if found[0] == "<" else "&amp;", text)


def unescape(text: str, end: str) -> str:
    """What `escape` made `text` from, for the same `end`. Raises ValueError like it."""
    if end[1:] not in text:
        return text
    return _disguised(end).sub(lambda found: "<" if found[0] == "&lt;" else "&", text)


def attribute(text: str) -> str:
    """`text` as the value of an attribute in double quotes."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def unattribute(text: str) -> str:
    """What `attribute` made `text` from; "&apos;" is read too."""
    return _ENTITY.sub(lambda found: _NAMED[found[0]], text) if "&" in text else text


@functools.lru_cache(maxsize=64)
def _open(end: str) -> re.Pattern[str]:
    rest = _rest(end)
    return re.compile(f"<(?={rest})|&(?=(?:amp;)*lt;{rest})")


@functools.lru_cache(maxsize=64)
def _disguised(end: str) -> re.Pattern[str]:
    rest = _rest(end)
    return re.compile(f"&lt;(?={rest})|&amp;(?=(?:amp;)*lt;{rest})")


def _rest(end: str) -> str:
    # With another "<" or "&" in it one escape could change whether the next is one, and reading back would depend on the order.
    if not end.startswith("<") or "<" in end[1:] or "&" in end:
        raise ValueError(f"{end!r} is no closing tag: it must begin with its only '<' and have no '&'")
    return re.escape(end[1:])
