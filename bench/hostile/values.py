"""Values that no field wants, as JSON text, so that what no parser keeps can be sent too."""

from __future__ import annotations

import json
import random
from typing import Any

NUMBERS = (
    "0", "-0", "-0.0", "1", "-1", "2", "0.5", "1e-320", "1e308", "1e999", "-1e999", "NaN", "Infinity", "-Infinity",
    "2147483647", "2147483648", "-2147483649", "4294967296", "9007199254740993", "9223372036854775807", "9223372036854775808",
    "18446744073709551616", "1" + "0" * 400, "-1" + "0" * 400, "9" * 5000, "1." + "0" * 5000 + "1", "1e" + "9" * 400,
)  # fmt: skip
TEXTS = (
    "", " ", "\x00", "a\x00b", "null", "true", "1", "\n" * 50, "\ufeff", "\u202e\u2066", "\U0010ffff", "\U0001f468\u200d\U0001f469" * 20,
    "é" * 3000, "x" * 70_000, "../../etc/passwd", "%s%n%x", "${jndi:ldap://x}", "'; DROP TABLE slots;--", "<script>alert(1)</script>",
    "{{ 7 * 7 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ ''.__class__.__mro__ }}", "\r\nX-Injected: 1", "<|im_end|>",
    "<think>", "</tool_call>", "[INST]", "<｜DSML｜tool_calls>", "a" * 129, "__proto__", "constructor",
)  # fmt: skip
_SPELT = (
    '"\\ud83d"', '"\\ude00\\ud83d"', '"\\ud83dA"', '"\\u0000"', "null", "true", "false", "[]", "{}", "[[]]", "[null]", '[""]',
    "[{}]", '{"":{}}',
    '{"type":{}}', '{"type":"x"}', '{"type":["function"]}', '[{"type":1}]', '{"a":1,"a":2}', '{"type":"text","text":{}}',
    '[1,"a",null,{},[]]',
    "[" * 60 + "]" * 60, '{"a":' * 60 + "1" + "}" * 60, "[" + ",".join(["0"] * 5000) + "]", "[" + ",".join(['""'] * 5000) + "]",
    "{" + ",".join(f'"k{i}":{i}' for i in range(3000)) + "}", '{"' + "k" * 70_000 + '":1}',
)  # fmt: skip

SPELLINGS = (*NUMBERS, *map(json.dumps, TEXTS), *_SPELT)
"""All of them."""


def spelt(body: Any, place: tuple[str | int, ...], value: str) -> bytes:
    """The body as JSON with `value`, JSON text or what is none, at `place`, which need not be there yet."""
    mark = "\ue123spelt here\ue123"
    return (
        json.dumps(_placed(body, place, mark), ensure_ascii=False)
        .replace(json.dumps(mark, ensure_ascii=False), value)
        .encode("utf-8", "replace")
    )


def _placed(value: Any, place: tuple[str | int, ...], what: Any) -> Any:
    if not place:
        return what
    key, rest = place[0], place[1:]
    if isinstance(key, int):
        items = list(value) if isinstance(value, list) else []
        items += [None] * (key + 1 - len(items))
        items[key] = _placed(items[key], rest, what)
        return items
    found = dict(value) if isinstance(value, dict) else {}
    found[key] = _placed(found.get(key), rest, what)
    return found


def places(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place inside a body, the body itself left out."""
    found: list[tuple[str | int, ...]] = [at] if at else []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        found += places(inner, (*at, key))
    return found


def hostile_text(random: random.Random) -> str:
    """Any characters, surrogates included."""
    return "".join(
        chr(random.choice([random.randrange(32), random.randrange(128), random.randrange(0x110000)]))
        for _ in range(random.randrange(40))
    )
