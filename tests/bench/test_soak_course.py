"""A small soak of the real server over a scripted model: it holds, and each thing that is then spoilt is found."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench.soak.asks import Pool
from bench.soak.books import imbalances
from bench.soak.clock import Clock
from bench.soak.disk import DiskRoom, damage
from bench.soak.faults import Fault, FaultKind, Saboteur
from bench.soak.judge import Evidence, judge
from bench.soak.ledger import ANSWERED, Ending, Record
from bench.soak.load import FILL_TOKENS, Load
from bench.soak.quiet import look
from bench.soak.reference import Comparison, Reference
from bench.soak.stop import stop
from bench.soak.subject import Subject

SLOTS, QUEUE, SEED, CTX, BURST = 4, 8, 5, 12000, 20
SCRIPT = {
    "answers": [
        {"say": "It is said that they are many, and that nobody has counted them all."},
        {"after": "Go on.", "say": "There is more, and it is longer than what came before.", "margin": 4},
        {"after": "Why is that so?", "say": "Nobody knows."},
    ],
}


class Course:
    """What one life of a server left, and how to look at it again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.evidence = Evidence(SLOTS, QUEUE)
        self.before: Mapping[str, float] = {}

    def server(self, slots: int, name: str, step_seconds: float) -> Subject:
        script = self.directory / f"{name}.json"
        script.write_text(json.dumps({**SCRIPT, "step_seconds": step_seconds}))
        options = ["--script", str(script), "--ctx", str(CTX), "--batched-session", str(slots), "--max-queue", str(QUEUE)]
        return Subject(options, self.directory / f"{name}.log")

    async def live(self) -> None:
        """Load, a kill in the middle, a quiet point, SIGTERM."""
        subject, room = self.server(SLOTS, "life", 0.008), DiskRoom(self.directory, 1)
        try:
            await subject.ready()
            self.before = await subject.metrics()
            load = Load(0, subject.address, Pool(SEED, singles=12, scripts=6), SEED, CTX)
            saboteur = Saboteur(0, subject, room, Clock(self.directory, faked=False))
            await load.fill(SLOTS, BURST)
            load.start(SLOTS)
            await asyncio.gather(load.burst(0, 3 * QUEUE), asyncio.sleep(1.0))
            await saboteur.inject(FaultKind.KILL, Random(0))
            await asyncio.sleep(0.5)
            seen = await look(0, subject, load, SEED, SLOTS, self.before)
            await load.end()
            found = self.evidence
            found.restarts[0] = (await subject.health())["restarts"]
            ended = await stop(0, subject, load, room, SEED, SLOTS)
            found.faults += [*saboteur.faults, Fault(FaultKind.STOP, 0, ended.signalled, time.monotonic(), "")]
            found.looks.append(seen)
            found.ends.append(ended)
            found.records += load.records
        finally:
            subject.kill()
        found.comparison = await self.compared(found.records)

    async def compared(self, records: list[Record]) -> Comparison:
        subject = self.server(1, "reference", 0.0)
        try:
            await subject.ready()
            return await Reference(subject.address).compare(records)
        finally:
            subject.kill()


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    lived = Course(tmp_path_factory.mktemp("soak"))
    asyncio.run(lived.live())
    return lived


def test_a_real_server_holds_but_for_the_checkpoints_that_a_script_has_none_of(course: Course) -> None:
    assert [f"{finding.rule}: {finding.detail}" for finding in judge(course.evidence)] == [
        "stop: life 0: 0 checkpoints were written, and 0 are unsound"
    ]


def test_the_load_was_no_idle_one(course: Course) -> None:
    endings = {record.ending for record in course.evidence.records}
    assert {Ending.ANSWERED, Ending.FAILED, Ending.BUSY} <= endings
    assert {record.api for record in course.evidence.records} >= {"chat", "completions", "responses", "messages"}
    comparison = course.evidence.comparison
    assert comparison is not None
    assert comparison.whole > 10
    assert course.evidence.looks[0].requests > 30


def test_a_life_begins_with_each_kind_of_request_then_the_longest_in_every_slot_the_same_from_memory_and_a_burst(
    course: Course,
) -> None:
    records = course.evidence.records
    fill = [record for record in records if record.kind == "fill"]
    each = Pool(SEED, singles=12, scripts=6).one_of_each()
    assert len(each) >= 5
    assert [record.ask for record in fill[: len(each)]] == each
    assert fill == records[: len(each) + 2 + 2 * SLOTS]  # two small ones tell how long a sentence is
    assert {record.ending for record in fill} == {Ending.ANSWERED}
    fill = fill[len(each) :]
    texts = {record.ask.wish.said[0] for record in fill if record.ask is not None}
    assert not any(text.startswith(other) for text in texts for other in texts - {text})  # none goes on another's
    first, again = fill[2 : 2 + SLOTS], fill[2 + SLOTS :]
    sizes = {record.ask.key: record.said.prompt_tokens for record in first if record.ask is not None}
    assert len(sizes) == SLOTS
    assert all(0.98 * CTX < size + FILL_TOKENS <= CTX for size in sizes.values())
    assert max(record.said.cached_tokens for record in first) < 0.02 * CTX
    assert {record.ask.key for record in again if record.ask is not None} == set(sizes)
    assert min(record.said.cached_tokens for record in again) > 0.9 * CTX
    assert min(record.others for record in fill[2:]) == 0  # each time all at once, and nothing else beside them
    assert max(record.others for record in first) == max(record.others for record in again) == SLOTS - 1
    burst = records[len(fill) : len(fill) + BURST]
    assert {Ending.ANSWERED, Ending.BUSY} == {record.ending for record in burst}
    assert min(record.others for record in burst if record.ending is Ending.BUSY) >= QUEUE


def test_a_request_that_the_server_forgot_or_made_up_is_missed(course: Course) -> None:
    seen = course.evidence.looks[0]
    records = [record for record in course.evidence.records if record.kind != "stop"]  # its counters went with the server
    assert imbalances(course.before, seen.reading, records) == []
    counted = next(record for record in records if record.fates <= ANSWERED)
    assert imbalances(course.before, seen.reading, [record for record in records if record is not counted])
    assert imbalances(course.before, seen.reading, [*records, *[counted] * 60])


def test_one_letter_of_one_answer_is_enough(course: Course) -> None:
    records = [record for record in course.evidence.records if record.ending is Ending.ANSWERED and record.said.text]
    spoilt = replace(records[0], said=replace(records[0].said, text=records[0].said.text[:-1] + "\N{SNOWMAN}"))
    found = asyncio.run(course.compared([spoilt, *records[1:3]]))
    assert [wrong.record for wrong in found.wrong] == [spoilt]


def test_every_way_of_damage_changes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "one.kv"
    ways = set()
    for seed in range(40):
        path.write_bytes(bytes(range(256)) * 40)
        before = path.read_bytes()
        ways.add(damage(path, Random(seed), reader=1))
        assert path.read_bytes() != before
    assert ways == {"bit", "bytes", "head", "cut", "empty", "grown"}
