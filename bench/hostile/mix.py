"""Which requests make up a run: the same share of each kind in every batch, so that what is learnt early counts for all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from bench.hostile import cases_fields, cases_history, cases_http, cases_json, cases_tools
from bench.hostile.case import Case, numbered
from bench.hostile.openapi_cases import Described

Make = Callable[[random.Random], Case]
SHARES = {
    "valid": 22, "invalid": 12, "field": 24, "mutation": 8, "json": 6, "sampling": 4, "form": 4, "tool": 5, "schema": 3,
    "history": 5, "random-history": 4,
    "encoding": 1, "framing": 3, "headers": 2, "route": 4, "slow": 3,
}  # fmt: skip
"""Out of 110 requests, so many of each group."""


_FILLING = ("form", "tool", "encoding")


class Mix:
    """All requests there are, each by its group and number."""

    def __init__(self, description: Mapping[str, Any], seed: int) -> None:
        self._description = description
        self._seed = seed
        self._described = Described(description, seed)
        self._random: dict[str, Make] = {
            "mutation": cases_fields.mutated,
            "schema": cases_tools.random_schemas,
            "random-history": cases_history.mixed,
            "slow": cases_http.slow,
        }

    @cached_property
    def _listed(self) -> dict[str, list[Case]]:
        """The groups that are lists, each in an order of the seed's."""
        found: dict[str, Sequence[Case]] = {
            "sampling": cases_fields.extremes(),
            "json": cases_json.texts(),
            "encoding": cases_json.encodings(),
            "form": cases_tools.forms(),
            "tool": cases_tools.tools(),
            "history": cases_history.fixed(),
            "framing": cases_http.framing(),
            "headers": cases_http.headers(),
            "route": cases_http.routes(self._description),
        }
        lists = {group: list(cases) for group, cases in found.items()}
        for group, cases in lists.items():
            random.Random(f"{self._seed} {group}").shuffle(cases)
        return lists

    @cached_property
    def _fields(self) -> list[cases_fields.Field]:
        fields = cases_fields.fields(self._description)
        random.Random(f"{self._seed} field").shuffle(fields)
        return fields

    def case(self, group: str, number: int) -> Case:
        """Raises KeyError for a group that does not exist."""
        if group in ("valid", "invalid"):
            made = self._described.case(group == "valid", number)
        elif group in self._random:
            made = self._random[group](random.Random(f"{self._seed} {group} {number}"))
        elif group == "field":
            made = self._fields[number % len(self._fields)].case()
        else:
            made = self._listed[group][number % len(self._listed[group])]
        return numbered(made, group, number)

    def batches(self, requests: int, size: int) -> Iterator[list[Case]]:
        """So many requests in batches of `size`, the groups mixed, each group in its own order.

        A long run begins with all schemas: they fill the cache of compiled grammars, which would look like growth later.
        """
        counters = dict.fromkeys(SHARES, 0)
        credit = dict.fromkeys(SHARES, 0.0)
        total = sum(SHARES.values())
        batch: list[Case] = []
        first = {group: len(self._listed[group]) for group in _FILLING}
        if sum(first.values()) < requests / 5:
            yield [self.case(group, number) for group, count in first.items() for number in range(count)]
            requests -= sum(first.values())
            counters |= first
        for _ in range(requests):
            for group, share in SHARES.items():
                credit[group] += share / total
            group = max(credit, key=lambda name: credit[name])
            credit[group] -= 1
            batch.append(self.case(group, counters[group]))
            counters[group] += 1
            if len(batch) == size:
                yield batch
                batch = []
        if batch:
            yield batch
