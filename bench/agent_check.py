"""Holds answers against the same requests made alone to a fresh server, and against each other.

Owns the oracle's order: between two requests a short stranger takes its only slot, so that each is evaluated from its
first token. What the oracle reused in spite of that is counted, since such an answer proves less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench import seeded
from bench.agent_client import AgentClient, Request
from bench.agent_scenario import Record, unique_bodies


@dataclass(frozen=True)
class Check:
    """How many answers were compared, and which differed."""

    repeated: int  # requests that were made more than once, by any run
    unlike: tuple[str, ...]  # of them, those whose answers differed
    compared: int  # with the oracle
    mismatches: tuple[str, ...]
    failed: int  # the oracle gave no answer
    warm: int  # the oracle had reused something


def chosen(records: Sequence[Record], most: int | None, seed: int) -> list[Record]:
    """One record of each different request, at most `most`: those that something happened to first, then by lot."""
    first = [group[0] for group in unique_bodies(records).values()]

    def rank(record: Record) -> tuple[bool, int]:
        return record.request.kind == "turn", seeded.digest(seed, "check", record.request.id)

    return sorted(first, key=rank)[:most]


def repeated(records: Sequence[Record]) -> tuple[int, tuple[str, ...]]:
    """How many requests were made more than once, and the ids of those that were answered in more than one way."""
    groups = [group for group in unique_bodies(records).values() if len(group) > 1]
    unlike = [group[0].request.id for group in groups if len({record.answer.bits for record in group}) > 1]
    return len(groups), tuple(unlike)


async def check(url: str, timeout: float, records: Sequence[Record], sample: Sequence[Record]) -> Check:
    """Ask the oracle at `url` for each of `sample`; compare all of `records` with each other. `timeout` of an answer, seconds."""
    async with AgentClient(url, timeout) as client:
        return await _compared(client, records, sample)


async def _compared(client: AgentClient, records: Sequence[Record], sample: Sequence[Record]) -> Check:
    mismatches: list[str] = []
    failed = warm = 0
    for number, record in enumerate(sample):
        request = record.request
        stranger = {"model": request.body["model"], "messages": [{"role": "user", "content": f"{number}?"}], "max_tokens": 1}
        await client.ask(Request(f"stranger-{number}", "stranger", "turn", {**stranger, "temperature": 0}))
        answer = await client.ask(Request(f"alone-{request.id}", request.agent, request.kind, request.body))
        failed += bool(answer.failure)
        warm += answer.cached_tokens > 0
        if not answer.failure and answer.bits != record.answer.bits:
            mismatches.append(request.id)
    count, unlike = repeated(records)
    return Check(count, unlike, len(sample) - failed, tuple(mismatches), failed, warm)
