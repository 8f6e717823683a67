"""JSON as clients spell it, brought to one spelling without losing any of it. Pure functions of text.

Parsed values will not do here: they lose how numbers were spelt and which members came twice, and a prompt that changes with
them is another prompt. So the text is checked by the parser and rewritten token by token.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

MAX_DEPTH = 256
"""Objects and lists in each other; deeper text counts as unreadable."""

# Finds the tokens of valid JSON; what it makes of other text does not matter, but it passes each character once: a string that
# is never closed is one token. Possessive, so that a string of a million escapes takes no stack.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}:,]|[^\s"\[\]{}:,]+')
_SURROGATES = re.compile("[\ud800-\udfff]")
_SPACED = {",": ", ", ":": ": "}
_encode = json.JSONEncoder(ensure_ascii=False).encode


def canonical(value: str | bytes) -> str:
    """JSON in the spelling that prompts show, equal for all spellings of the same.

    Members keep their order, duplicates included, and numbers their spelling. ", " and ": " separate. Strings are decoded, with
    `\\" \\\\ \\b \\f \\n \\r \\t` and `\\u00xx` for other control characters; lone surrogates become U+FFFD. Text that is no JSON,
    has NaN or Infinity or is nested deeper than MAX_DEPTH comes back unchanged, but for what is no UTF-8.
    """
    text = value if isinstance(value, str) else value.decode("utf-8", "replace")
    tokens = _tokens(text)
    if tokens is None:
        return _clean(text)
    return "".join([_string(token) if token[0] == '"' else _SPACED.get(token, token) for token in tokens])


def members(arguments: str) -> list[tuple[str, str | None, str]] | None:
    """The members of a JSON object, in order: key, the text of a string or None for any other value, and the value's JSON.

    That JSON is minified and otherwise as it was spelt. Of a key that comes twice the last value counts, at the first's place. None
    for text that is no object; what cannot be read is what `canonical` leaves unchanged.
    """
    tokens = _tokens(arguments)
    if tokens is None or tokens[0] != "{":
        return None
    found: dict[str, tuple[str | None, str]] = {}
    at = 1
    while tokens[at] != "}":
        if tokens[at] == ",":
            at += 1
        key, start = _decode(tokens[at]), at + 2  # behind the colon
        at = _value_end(tokens, start)
        first = tokens[start]
        found[key] = (_decode(first) if first[0] == '"' else None, _clean("".join(tokens[start:at])))
    return [(key, text, spelt) for key, (text, spelt) in found.items()]


def compact(json_text: str) -> str:
    """JSON without the white space outside its strings; unchanged when it is no JSON, see `canonical`."""
    tokens = _tokens(json_text)
    return json_text if tokens is None else "".join(tokens)


def _tokens(text: str) -> list[str] | None:
    """The tokens of a JSON text, at least one; None when it is none."""
    tokens = _TOKEN.findall(text)
    depth = 0
    for token in tokens:
        if token == "{" or token == "[":
            depth += 1
            if depth > MAX_DEPTH:  # before the parser sees it, which recurses
                return None
        elif token == "}" or token == "]":
            depth -= 1
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except ValueError:
        return None
    return tokens


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _value_end(tokens: list[str], at: int) -> int:
    """The index behind the value that begins at `at`."""
    depth = 0
    while True:
        token = tokens[at]
        at += 1
        if token == "{" or token == "[":
            depth += 1
        elif token == "}" or token == "]":
            depth -= 1
        if not depth:
            return at


def _string(token: str) -> str:
    """A string's token in canonical spelling."""
    return _encode(_decode(token)) if "\\" in token else _clean(token)


def _decode(token: str) -> str:
    return _clean(str(json.loads(token)) if "\\" in token else token[1:-1])


def _clean(text: str) -> str:
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)
