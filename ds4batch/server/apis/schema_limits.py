"""What of a JSON schema would cost more than a grammar's length shows. Pure; knows no field and no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds4batch.grammar_limits import MAX_MEMBERS, MAX_OPTIONAL, MAX_PATTERN_PAIRS


def excess(schema: Mapping[str, Any]) -> str:
    """What there is too much of in the schema to hold an answer to it, "" for nothing. Linear in its length."""
    pairs = 0
    pending: list[Any] = [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, list):
            pending += one
            continue
        if not isinstance(one, Mapping):
            continue
        pending += one.values()
        declared, required = one.get("properties"), one.get("required")
        if isinstance(declared, Mapping):
            if len(declared) > MAX_MEMBERS:
                return f"an object has {len(declared)} members, at most {MAX_MEMBERS} are taken"
            needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
            optional = sum(1 for key in declared if key not in needed)
            if optional > MAX_OPTIONAL:
                return f"an object has {optional} members that may be left out, at most {MAX_OPTIONAL} are taken"
        patterns = one.get("patternProperties")
        if isinstance(patterns, Mapping):
            pairs += len(patterns) * (len(patterns) - 1) // 2
            if pairs > MAX_PATTERN_PAIRS:
                return f"too many patternProperties to compare with each other: {pairs} pairs, at most {MAX_PATTERN_PAIRS}"
    return ""
