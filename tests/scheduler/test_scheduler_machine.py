"""Any order of submits, steps, cancels, failures and pauses keeps the promises - above all that an answer follows from its
tokens, whatever was reused, batched, cut or cancelled beside it."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_rig import TEXT, Reader, Rig

from scheduler import Ended, Job, JobState, Progress, QueueFull, Routed, Sampled, Scheduler, StepDone
from scheduler.job import RUNNING
from scheduler.slots import IDLE_CAP

SLOTS, CTX, QUEUE = 3, 160, 5
LONG = "<|system|>be brief, kind, quick, calm, exact, warm, frank, wise, and do not guess: ask.<|end|>"  # worth a fork
SYSTEMS = ("<|system|>be brief and kind<|end|>", LONG, "")
WORDS = ("the thing", "another", "then", "in", "er", "x")


class Machine(RuleBasedStateMachine):
    """One scheduler, and a model of it that knows only what went in and what came out."""

    owners: ClassVar[dict[str, dict[str, object]]] = {"": {}}  # by name, what their jobs come with

    def __init__(self) -> None:
        super().__init__()
        self.owner = next(iter(self.owners))
        self.make()

    def make(self, **changes) -> None:
        self.rig = Rig(
            SLOTS, CTX, mixed_prefill_quantum=16, idle_prefill_quantum=32, max_queue=QUEUE, rewind_min_tokens=8,
            price=lambda work: 0.01 * sum(len(row.tokens) for row in work), **changes,
        )  # fmt: skip
        self.jobs: list[Job] = []  # accepted, in order
        self.ended: dict[int, Ended] = {}

    @property
    def scheduler(self) -> Scheduler:
        return self.rig.scheduler

    # what clients do

    def submit(self, prompt: str | list[int], max_tokens: int, stop: list[str], **rest) -> None:
        rest |= {"owner": self.owner} | self.owners[self.owner]
        queued = Counter(job.owner for job in self.jobs if job.state is JobState.QUEUED)
        waiting, own = self.scheduler.stats().waiting, queued[self.owner]
        share = -(-QUEUE // len({*queued, self.owner}))
        free = SLOTS - self.scheduler.stats().running
        if not 0 < len(TEXT.tokenise(prompt) if isinstance(prompt, str) else prompt) < CTX:
            with pytest.raises(ValueError, match=r"no room|empty"):
                self.rig.submit(prompt, max_tokens=max_tokens, **rest)
        elif waiting >= QUEUE + free and own >= share:
            with pytest.raises(QueueFull):
                self.rig.submit(prompt, max_tokens=max_tokens, **rest)
        else:
            sampling = (0, 1, 0, 1, -1)[len(self.jobs) % 5]  # the last may not be chained
            rest |= {"steered": len(self.jobs) % 7 == 3, "drafted": len(self.jobs) % 6 != 5}
            self.jobs.append(self.rig.submit(prompt, max_tokens=max_tokens, stop=stop, sampling=sampling, **rest))

    prompts = st.tuples(st.sampled_from(SYSTEMS), st.lists(st.sampled_from(WORDS), min_size=1, max_size=6))
    lengths = st.integers(1, 24)
    stops = st.sampled_from([[], [], ["e"], ["a", "9 "]])

    @rule(prompt=prompts, max_tokens=lengths, stop=stops, ignore_eos=st.booleans())
    def new_conversation(self, prompt, max_tokens, stop, ignore_eos):
        self.submit(prompt[0] + "<|user|>" + " ".join(prompt[1]) + "<|end|>", max_tokens, stop, ignore_eos=ignore_eos)

    @rule(tokens=st.lists(st.integers(4, 60), max_size=20), max_tokens=lengths)
    def prompt_of_ids(self, tokens, max_tokens):
        self.submit(tokens, max_tokens, [])

    @precondition(lambda self: self.answered())
    @rule(which=st.integers(1, 3), word=st.sampled_from(WORDS), max_tokens=lengths, stop=stops, fast=st.booleans())
    def next_turn(self, which, word, max_tokens, stop, fast):
        """The client goes on, at once or after a further step."""
        job = self.answered()[-which:][0]
        self.submit(job.text + job.output.text + f"<|end|><|user|>{word}<|end|>", max_tokens, stop)
        if fast:
            self.advance()

    def answered(self) -> list[Job]:
        """Jobs whose answer is complete, the latest last."""
        done = [job for job in self.jobs if job.id in self.ended and self.ended[job.id].reason in ("stop", "length")]
        return sorted(done, key=lambda job: (job.times.finished or 0.0, job.id))

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 99), max_tokens=lengths, stop=stops)
    def retry(self, which, max_tokens, stop):
        job = self.jobs[which % len(self.jobs)]
        self.submit(job.text or job.tokens, max_tokens, stop)

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 99), cut=st.integers(1, 60), word=st.sampled_from(WORDS), max_tokens=lengths)
    def edit(self, which, cut, word, max_tokens):
        job = self.jobs[which % len(self.jobs)]
        self.submit((job.text + job.output.text)[:-cut] + word, max_tokens, [])

    @rule(slot=st.integers(0, SLOTS - 1), live=st.integers(0, 4), max_tokens=lengths)
    def bound_job(self, slot, live, max_tokens):
        self.submit("<|user|>result", max_tokens, [], required_slot=slot, needs_live_state=live == 4)

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 99))
    def cancel(self, which):
        job = self.jobs[which % len(self.jobs)]
        self.scheduler.cancel(job.id, "client")

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 99), other=st.integers(0, 99))
    def cancel_from_within_a_step(self, which, other):
        """The reader of one job's text finds that nobody wants another's, or its own."""
        cancelled = self.jobs[other % len(self.jobs)].id
        self.jobs[which % len(self.jobs)].output.on_push = lambda _: self.scheduler.cancel(cancelled, "slow_reader")

    @rule(seconds=st.sampled_from([0.5, 31.0, 3599.0, 3600.0, float(IDLE_CAP)]))
    def time_passes(self, seconds):
        self.rig.clock.advance(seconds)

    @rule(really=st.integers(0, 5))
    def device_fails_next_time(self, really):
        self.rig.backend.fail_next(really == 5)

    @rule(really=st.integers(0, 5))
    def device_gives_nonsense_next_time(self, really):
        self.rig.backend.spoil_next(really == 5)

    # what the scheduler does

    @rule()
    def step(self):
        self.advance()

    @rule(count=st.integers(2, 30))
    def steps(self, count):
        for _ in range(count):
            self.advance()

    def advance(self) -> None:
        before = self.scheduler.stats()
        now = self.rig.clock()
        left_at = self.left_at()
        live = [job for job in self.jobs if job.state in (JobState.PREFILL, JobState.DECODE)]
        flying = {job.id: len(job.generated) for job in live if job.drawing}
        drawn = {job.id: len(job.generated) for job in live if job.pending is not None}
        prefilling = [job for job in live if job.done < len(job.prompt)]
        failures = self.rig.backend.counts.failures
        events = self.rig.step()
        for event in events:
            if isinstance(event, Ended):
                self.take_end(event)
        self.check_routes([e for e in events if isinstance(e, Routed)], before, left_at, now)
        if self.rig.backend.counts.failures == failures:
            self.check_progress(events, live, flying, drawn, prefilling)

    def check_progress(self, events, live: list[Job], flying: dict[int, int], drawn: dict[int, int], prefilling) -> None:
        """Whatever could go on did, and each prefill gets its turn."""
        assert not prefilling or any(isinstance(e, Progress) for e in events)
        if not self.rig.backend.chains:
            assert sum(e.decode_rows for e in events if isinstance(e, StepDone)) == len(drawn)
        for job in live:
            if job.id in self.ended:
                continue
            if job.id in flying:  # its draw was taken in, and the next one with it where a neighbour may not be chained
                assert len(job.generated) in (flying[job.id] + 1, flying[job.id] + 2 - job.drawing) or job.ending == "stop"
            elif job.id in drawn:
                assert len(job.generated) + job.drawing == drawn[job.id] + 1 or job.ending == "stop"

    def left_at(self) -> dict[int, float]:
        """When the last job of each slot ended."""
        ends = sorted((job.times.finished, job.slot) for job in self.jobs if job.times.finished and job.slot is not None)
        return {slot: end for end, slot in ends}

    def take_end(self, event: Ended) -> None:
        job = next(job for job in self.jobs if job.id == event.job)
        assert job.id not in self.ended, "a job ended twice"
        assert job.state is JobState.FINISHED
        self.ended[job.id] = event
        if job.slot is not None:
            self.check_prompt(job)
        self.check_answer(job, event)

    def check_prompt(self, job: Job) -> None:
        """Only tiers that go by the text may spell a prompt in other tokens, and never another text."""
        if job.tier in ("memory-text", "rewind-point"):
            assert TEXT.render(job.prompt) == job.text
        else:
            assert job.prompt == job.tokens

    def check_answer(self, job: Job, event: Ended) -> None:
        """The answer, or as much of it as was given, is what the prompt's tokens alone would have brought."""
        if not job.prompt:
            assert job.generated == []
            return
        expected = Reader(job.output.stop)
        alone = self.rig.alone(job)
        reason = "length" if len(alone) == job.limit else "stop"
        for token in alone:
            if expected.push(Sampled(token, None, ())) is not None:
                reason = "stop"
                break
        if event.reason in ("stop", "length"):
            assert job.output.finished
            assert (job.generated, job.output.text, event.reason) == (expected.tokens, expected.text, reason)
            assert event.completion_tokens == len(expected.tokens)
            self.check_session(job, event)
        else:
            assert not job.output.finished
            assert job.output.tokens == alone[: len(job.output.tokens)]

    def check_session(self, job: Job, event: Ended) -> None:
        """What was evaluated beyond an answer's end is gone where it can be: the last token of a full one, a stop token, what
        follows a stop string."""
        live = list(self.rig.backend.tokens(job.slot))
        whole = job.prompt + job.generated
        assert live == whole[: len(live)]
        if event.reason == "length":
            assert len(live) == len(whole) - 1

    def check_routes(self, routes: list[Routed], before, left_at: dict[int, float], now: float) -> None:
        """Empty beats evicting, stale beats protected, the most idle goes first, and nobody overtakes."""
        self.check_order(routes)
        free = {i: slot.state for i, slot in enumerate(before.slots) if slot.state in ("empty", "idle", "stale")}
        for route in routes:
            assert route.slot in free, "a slot in two jobs"
            job = next(job for job in self.jobs if job.id == route.job)
            state = free.pop(route.slot)
            others = free.values()
            assert (route.victim == "empty") <= (state == "empty")
            if job.required_slot is None and route.fell_from is None:
                if route.victim in ("stale", "protected") and not (route.victim == "stale" and route.cached_tokens):
                    assert "empty" not in others
                if route.victim == "protected":
                    assert "stale" not in others
                if route.victim == "stale" and not route.cached_tokens:
                    idle = int(now - left_at[route.slot])
                    rivals = [int(now - left_at[i]) for i, other in free.items() if other == "stale"]
                    assert min(idle, IDLE_CAP) >= max((min(rival, IDLE_CAP) for rival in rivals), default=0)

    def check_order(self, routes: list[Routed]) -> None:
        for route in routes:
            job = next(job for job in self.jobs if job.id == route.job)
            waiting = [one for one in self.jobs if one.state is JobState.QUEUED and one.required_slot is None]
            waiting = [one for one in waiting if one.owner == job.owner]
            assert all(one.id > job.id for one in waiting) or job.required_slot is not None

    @invariant()
    def the_counts_agree(self):
        stats = self.scheduler.stats()
        assert stats.running + stats.waiting == stats.accepted - stats.ended
        assert stats.accepted == len(self.jobs)
        assert len(stats.slots) == SLOTS
        assert all(slot.state in ("empty", "idle", "stale", "prefill", "decode", "parked") for slot in stats.slots)
        assert stats.running == sum(slot.state in ("prefill", "decode", "parked") for slot in stats.slots)
        assert 0 <= stats.kv_usage <= 1
        self.rig.backend.memory.check()
        assert stats.pool.used == self.rig.backend.distinct(dict.fromkeys(range(SLOTS), CTX))
        running = Counter(job.owner for job in self.jobs if job.state in RUNNING)
        assert all(count <= (self.owners[owner].get("owner_limit", 0) or SLOTS) for owner, count in running.items())
        self.scheduler.check()

    def teardown(self):
        """Whatever was going on, everything ends, and every slot can be used again."""
        self.rig.backend.fail_next(0)
        self.rig.backend.spoil_next(0)
        for _ in range(3000):
            if not self.scheduler.busy:
                break
            self.advance()
        assert not self.scheduler.busy
        assert set(self.ended) == {job.id for job in self.jobs}
        self.jobs.clear()
        after = [self.rig.submit(f"afterwards {i}") for i in range(SLOTS)]
        self.rig.run()
        assert all(job.generated == self.rig.alone(job) for job in after)


class RecurrentMachine(Machine):
    """The same over sessions that can be extended or emptied, never cut."""

    def make(self) -> None:  # type: ignore[override]
        super().make(can_rewind=False)


class EagerMachine(Machine):
    """The same where texts are read before the next forward."""

    def make(self) -> None:  # type: ignore[override]
        super().make(overlap=False)


class ChainedMachine(Machine):
    """The same over a device that works on its own, with tokens it need not tell before it goes on."""

    def make(self) -> None:  # type: ignore[override]
        super().make(chains=True)


class ElasticMachine(Machine):
    """The same where the sessions do not all fit, and nobody knows beforehand how long an answer will be."""

    def make(self, **changes) -> None:
        super().make(page_tokens=16, pages=-(-CTX // 16) + 2, lookahead=2, **changes)

    def check_progress(self, events, live: list[Job], flying: dict[int, int], drawn: dict[int, int], prefilling) -> None:
        """Somebody goes on, and the oldest always does."""
        oldest = min(live, key=lambda job: (job.times.scheduled, job.id), default=None)
        if oldest is not None and oldest.id not in self.ended:
            assert not oldest.parked
            before = flying.get(oldest.id, drawn.get(oldest.id))
            if before is None or oldest in prefilling:
                assert any(isinstance(e, Progress) for e in events)
            else:
                assert len(oldest.generated) + oldest.drawing > before or oldest.ending is not None

    def check_session(self, job: Job, event: Ended) -> None:
        if self.rig.backend.tokens(job.slot):  # else it gave its pages away in the same step
            super().check_session(job, event)

    def check_routes(self, routes: list[Routed], before, left_at: dict[int, float], now: float) -> None:
        """Whose session goes for pages is another question than whose slot is taken."""
        self.check_order(routes)


class ElasticChainedMachine(ElasticMachine):
    """Both."""

    def make(self) -> None:  # type: ignore[override]
        super().make(chains=True)


class Owners(Machine):
    """Several owners, one without a name, one that may run one job at a time."""

    owners: ClassVar = {"": {}, "a": {"owner_weight": 0.5}, "b": {"owner_limit": 1, "owner_weight": 3.0}, "c": {"owner_limit": 2}}

    @rule(owner=st.sampled_from(sorted(owners)))
    def another_sends(self, owner):
        self.owner = owner


class OwnersMachine(Owners):
    """Any order of submits and steps, from several."""


class ElasticOwnersMachine(Owners, ElasticMachine):
    """Several owners where the sessions do not all fit: who waits for pages is not overtaken by another's job either."""

    def advance(self) -> None:
        self.held = self.scheduler._roster.fairness._held
        super().advance()

    def check_order(self, routes: list[Routed]) -> None:
        super().check_order(routes)
        if self.held is not None and self.held.state is JobState.QUEUED:
            owners = {job.id: job.owner for job in self.jobs}
            assert all(owners[route.job] == self.held.owner for route in routes)


class ChainedOwnersMachine(ElasticOwnersMachine, ElasticChainedMachine):
    """All of it."""


STEPS = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip

TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = STEPS
TestAnyOrderRecurrent = RecurrentMachine.TestCase
TestAnyOrderRecurrent.settings = STEPS
TestAnyOrderEager = EagerMachine.TestCase
TestAnyOrderEager.settings = STEPS
TestAnyOrderChained = ChainedMachine.TestCase
TestAnyOrderChained.settings = STEPS
TestAnyOrderElastic = ElasticMachine.TestCase
TestAnyOrderElastic.settings = STEPS
TestAnyOrderElasticChained = ElasticChainedMachine.TestCase
TestAnyOrderElasticChained.settings = STEPS
TestAnyOrderOwners = OwnersMachine.TestCase
TestAnyOrderOwners.settings = STEPS
TestAnyOrderElasticOwners = ElasticOwnersMachine.TestCase
TestAnyOrderElasticOwners.settings = STEPS
TestAnyOrderChainedOwners = ChainedOwnersMachine.TestCase
TestAnyOrderChainedOwners.settings = STEPS
