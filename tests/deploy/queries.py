"""What /metrics exports, and a reader of PromQL that is just good enough to hold a query to it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from ds4batch.server.metrics import Metrics
from ds4batch.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
TARGET = {"job", "instance"}  # labels that a scrape adds
FUNCTIONS = {
    "avg_over_time",
    "clamp_min",
    "histogram_quantile",
    "increase",
    "label_values",
    "max",
    "min",
    "min_over_time",
    "rate",
    "sum",
}
WORDS = {"by", "and", "or", "unless", "on", "ignoring", "offset", "bool"}
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_PAIRS = {")": "(", "]": "[", "}": "{"}

Labels = dict[str, set[str]]


@functools.cache
def exported() -> dict[str, Labels]:
    """Every series at the start of a server that drafts and has sessions: its labels and their values."""
    settings = Settings(model="x", ctx=4096, batched_session=2, draft="lookup", mtp_draft=3)
    series: dict[str, Labels] = {}
    for family in text_string_to_metric_families(Metrics(settings, "x").exposition().decode()):
        for sample in family.samples:
            labels = series.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return series


def problems(expr: str, more: frozenset[str] = frozenset()) -> list[str]:
    """What is wrong with a query; `more` are series that others export."""
    if wrong := list(_unbalanced(expr)):
        return wrong
    return [*_unknown(expr, more), *_wrong_groups(expr), *_wrong_quantiles(expr)]


def selectors(expr: str) -> dict[str, list[tuple[str, str, str]]]:
    """The series a query names, each with its matchers: label, operator, value."""
    bare = re.sub(r"\b(?:by|on|ignoring)\s*\([^)]*\)", " ", expr)
    bare = re.sub(r"\[[^\]]*\]", " ", bare)
    found: dict[str, list[tuple[str, str, str]]] = {}
    for match in re.finditer(rf"(?<![\w:.$\"~])({_NAME})\s*(\{{[^}}]*\}})?(\s*\()?", _outside_braces(bare)):
        name, _, call = match.groups()
        if call is None and name not in WORDS:
            found.setdefault(name, [])
    for name, inside in re.findall(rf"({_NAME})\s*\{{([^}}]*)\}}", bare):
        found.setdefault(name, []).extend(re.findall(rf'({_NAME})\s*(=~|!~|!=|=)\s*"([^"]*)"', inside))
    return found


def grouped(expr: str) -> set[str]:
    """The labels that a query's aggregations keep."""
    return {label.strip() for labels in re.findall(r"\bby\s*\(([^)]*)\)", expr) for label in labels.split(",")}


def _outside_braces(expr: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", expr)


def _unbalanced(expr: str) -> Iterator[str]:
    open_: list[str] = []
    for character in re.sub(r'"[^"]*"', "", expr):
        if character in "([{":
            open_.append(character)
        elif character in _PAIRS and (not open_ or open_.pop() != _PAIRS[character]):
            yield f"unbalanced {character} in {expr}"
    if open_:
        yield f"unclosed {open_} in {expr}"


def _unknown(expr: str, more: frozenset[str]) -> Iterator[str]:
    for name in re.findall(rf"({_NAME})\s*\(", re.sub(r'"[^"]*"', '""', expr)):
        if name not in FUNCTIONS | WORDS:
            yield f"unknown function {name}"
    for name, matchers in selectors(expr).items():
        if name in more:
            continue
        labels = exported().get(name)
        if labels is None:
            yield f"{name} is not exported"
            continue
        for label, operator, value in matchers:
            if label in TARGET:
                continue
            if label not in labels:
                yield f"{name} has no label {label}"
            elif operator in ("=", "=~"):
                yield from (f"{name}: {label} is never {v}" for v in value.split("|") if v not in labels[label])


def _wrong_groups(expr: str) -> Iterator[str]:
    for match in re.finditer(r"\bby\s*\(([^)]*)\)\s*(?=\()", expr):
        kept = {label.strip() for label in match.group(1).split(",")} - TARGET
        for name in selectors(_group(expr, match.end())):
            if missing := kept - exported().get(name, {}).keys():
                yield f"{name} has no label {', '.join(sorted(missing))} to group by"


def _wrong_quantiles(expr: str) -> Iterator[str]:
    for match in re.finditer(r"\bhistogram_quantile\s*(?=\()", expr):
        inside = _group(expr, match.end())
        if not (names := selectors(inside)) or not all(n.endswith("_bucket") for n in names):
            yield f"a quantile of no buckets: {inside}"
        if "rate(" not in inside or "le" not in grouped(inside):
            yield f"a quantile without rate or le: {inside}"


def _group(expr: str, start: int) -> str:
    """What stands in the parentheses that open at `start`."""
    depth = 0
    for at in range(start, len(expr)):
        depth += {"(": 1, ")": -1}.get(expr[at], 0)
        if depth == 0:
            return expr[start + 1 : at]
    return expr[start + 1 :]
