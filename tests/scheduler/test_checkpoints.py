"""When sessions are saved, who waits for it, and how a job begins that continues one from the store."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from fake_store import FakeStore, File
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_rig import TEXT, Rig, options

from scheduler import Ended, Job, JobState, Scheduler

LONG = "<|system|>be thorough<|end|><|user|>" + "tell me of the sea and the wind. " * 3 + "<|end|><|assistant|>"
OTHER = "<|user|>" + "another matter, and not a short one either. " * 3 + "<|end|><|assistant|>"


class StoreRig(Rig):
    """A rig whose scheduler has a store."""

    def __init__(self, slots: int = 1, ctx: int = 1024, *, files: dict[str, File] | None = None, **changes: Any) -> None:
        store = {k: changes.pop(k) for k in ("step", "cold") if k in changes}
        super().__init__(slots, ctx, **changes)
        for key in ("script", "price", "can_rewind", "chains", "page_tokens", "pages"):
            changes.pop(key, None)
        self.store = FakeStore(self.backend, {} if files is None else files, **store)
        self.scheduler = Scheduler(
            self.backend, self.text, self.clock, slots=slots, options=options(**changes), checkpoints=self.store
        )

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            self.step()
            if not self.scheduler.busy:
                return
            if self.scheduler.blocked and not self.store.woke:
                assert self.store.work(), "it waits for nothing"
        raise AssertionError(f"still busy after {limit} steps")


def follow_up(job: Job, more: str = "go on") -> str:
    return job.text + TEXT.render(job.generated) + f"<|end|><|user|>{more}<|end|><|assistant|>"


def correct(rig: Rig, job: Job) -> bool:
    """Whether the job was answered as it would be alone, from tokens that stand for its text."""
    return job.generated == rig.alone(job) and TEXT.render(job.prompt) == job.text


def test_a_session_is_saved_before_it_gives_way_and_found_again(either_device) -> None:
    rig = StoreRig()
    first = rig.answer(LONG)
    held = len(rig.backend.tokens(0))
    rig.answer(OTHER)
    assert rig.store.log == [("evict", held)]
    again = rig.answer(follow_up(first))
    routed = rig.routed(again)
    assert (routed.tier, routed.victim) == ("disk-text", "protected")
    assert routed.cached_tokens == held
    assert routed.source
    assert correct(rig, again)


def test_nothing_is_destroyed_before_its_copy_is_out(either_device) -> None:
    rig = StoreRig()
    rig.answer(LONG)
    held = list(rig.backend.tokens(0))
    job = rig.submit(OTHER)
    for _ in range(5):
        rig.step()
    assert job.state is JobState.QUEUED
    assert list(rig.backend.tokens(0)) == held
    assert rig.scheduler.blocked
    rig.run()
    assert correct(rig, job)


def test_a_live_session_comes_before_the_store_and_another_owner_s_after_it() -> None:
    rig = StoreRig(slots=2)
    first = rig.answer(LONG)
    rig.store.files[first.text] = File(list(first.prompt), "cold", False)
    assert rig.routed(rig.answer(follow_up(first))).tier in ("memory-token", "memory-text")
    shared = StoreRig(slots=2, rewind_min_tokens=8)
    shared.answer(LONG)
    mine = LONG.replace("wind", "tide")
    shared.store.files[mine] = File(TEXT.tokenise(mine), "evict", False)
    assert shared.routed(shared.answer(mine + "well<|end|><|user|>so<|end|>")).tier == "disk-text"


def test_others_decode_while_one_waits_for_its_state(either_device) -> None:
    rig = StoreRig(slots=2, files={LONG: File(TEXT.tokenise(LONG), "shutdown", False)})
    going = rig.submit(OTHER, max_tokens=40, ignore_eos=True)
    rig.step()
    waiting = rig.submit(LONG + "well<|end|>")
    for _ in range(12):
        rig.step()
        assert rig.scheduler.stats().slots[1].state == "restore"
        assert rig.scheduler.stats().slots[1].live_tokens == 0
    assert len(going.generated) >= 8
    assert not rig.scheduler.blocked
    while rig.store.work():
        pass
    rig.run()
    assert correct(rig, waiting)
    assert rig.routed(waiting).cached_tokens == len(TEXT.tokenise(LONG))


@pytest.mark.parametrize("worked", [0, 1, 2, 3])
def test_a_cancel_while_waiting_leaves_the_slot_as_it_is(worked: int) -> None:
    rig = StoreRig(files={OTHER: File(TEXT.tokenise(OTHER), "shutdown", False)})
    first = rig.answer(LONG)
    job = rig.submit(OTHER + "well<|end|>")
    rig.step()
    for _ in range(worked):
        rig.store.work()
    rig.scheduler.cancel(job.id, "client")
    rig.run()
    ended = rig.ended(job)
    assert (ended.reason, ended.phase) == ("abort", "restore")
    again = rig.answer(follow_up(first))
    assert rig.routed(again).tier in ("memory-token", "memory-text")  # nobody had emptied it
    assert correct(rig, again)
    assert rig.routed(rig.answer(OTHER + "well<|end|>")).tier == "disk-text"


def test_a_checkpoint_that_turns_out_bad_costs_one_cold_prefill() -> None:
    rig = StoreRig(files={LONG: File(TEXT.tokenise(LONG), "shutdown", False)})
    rig.store.broken.add(LONG)
    job = rig.answer(LONG + "well<|end|>")
    routed = rig.routed(job)
    assert (routed.tier, routed.cached_tokens, routed.fell_from) == ("none", 0, "disk-text")
    assert correct(rig, job)
    assert not rig.store.files


def test_a_prefill_that_fails_after_a_restore_costs_the_checkpoint() -> None:
    rig = StoreRig(files={LONG: File(TEXT.tokenise(LONG), "shutdown", False)})
    job = rig.submit(LONG + "well, " * 60)
    rig.step()
    while rig.store.work():
        pass
    rig.backend.fail_next(0)
    while job.state is not JobState.PREFILL:
        rig.step()
    rig.backend.fail_next()
    rig.run()
    assert rig.ended(job).status == 500
    assert rig.store.discarded == [LONG]


def test_chunks_end_where_sessions_are_saved_and_decoding_saves_at_the_same_places(either_device) -> None:
    rig = StoreRig(step=32, cold=lambda prompt, anchor: anchor)
    job = rig.answer(LONG, anchor=20, max_tokens=80, ignore_eos=True)
    size = len(job.prompt)
    wanted = [("cold", 20), *(("continued", n) for n in range(32, size + 80, 32))]
    assert [entry for entry in rig.store.log if entry[1] < size + 79] == [entry for entry in wanted if entry[1] < size + 79]
    while rig.store.work():
        pass
    for text, file in rig.store.files.items():
        assert TEXT.render(file.tokens) == text


def test_nothing_follows_a_checkpoint_and_its_last_token_is_evaluated_again() -> None:
    tokens = TEXT.tokenise(LONG)
    rig = StoreRig(files={LONG: File(tokens, "cold", False)})
    job = rig.answer(LONG)
    assert rig.routed(job).cached_tokens == len(tokens) - 1
    assert correct(rig, job)
    fixed = StoreRig(files={LONG: File(tokens, "cold", False)}, can_rewind=False)
    job = fixed.answer(LONG)
    assert (fixed.routed(job).tier, fixed.routed(job).fell_from) == ("none", "disk-text")
    assert correct(fixed, job)


def test_sessions_are_all_saved_at_the_end() -> None:
    rig = StoreRig(slots=3)
    texts = [LONG, OTHER]
    for text in texts:
        rig.answer(text)
    rig.scheduler.stop(drain=True)
    rig.scheduler.save_all()
    assert [why for why, _ in rig.store.log] == ["shutdown"] * 2
    while rig.store.work():
        pass
    new = StoreRig(slots=3, files=rig.store.files)
    for text in texts:
        assert new.routed(new.answer(text + "x")).tier in ("disk-text", "none")


def test_at_the_end_the_session_used_last_is_saved_first() -> None:
    """There may not be room, or time, for all."""
    rig = StoreRig(slots=4)
    jobs = [rig.answer(text) for text in (LONG, OTHER, "<|user|>" + "a third one. " * 5 + "<|end|><|assistant|>")]
    slots = [rig.routed(job).slot for job in jobs]
    for which in (1, 2):
        rig.clock.advance(5.0)
        assert rig.routed(rig.answer(follow_up(jobs[which]))).slot == slots[which]
    rig.scheduler.stop(drain=True)
    rig.scheduler.save_all()
    assert [slot for slot, *_ in rig.store.copies] == [slots[2], slots[1], slots[0]] != sorted(slots)


class Machine(RuleBasedStateMachine):
    """Any order of turns, edits, retries, cancels, failures, work of the store and restarts: every answer follows from its tokens."""

    chains = False
    slots = 2
    pool: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, File] = {}
        self.history: list[Job] = []  # answered, of all lives
        self.begin()

    def begin(self) -> None:
        self.rig = StoreRig(
            self.slots, 200, files=self.files, step=24, chains=self.chains, **self.pool, mixed_prefill_quantum=16, idle_prefill_quantum=32,
            rewind_min_tokens=8, price=lambda work: 0.01 * sum(len(row.tokens) for row in work),
        )  # fmt: skip
        self.jobs: list[Job] = []

    def submit(self, text: str, max_tokens: int) -> None:
        if 0 < len(TEXT.tokenise(text)) < 200:
            self.jobs.append(self.rig.submit(text, max_tokens=max_tokens, anchor=12))

    words = st.lists(st.sampled_from(("the thing", "another", "then", "in", "er")), min_size=1, max_size=5)

    @rule(system=st.sampled_from(("<|system|>be brief and kind<|end|>", "")), said=words, max_tokens=st.integers(1, 20))
    def new_conversation(self, system, said, max_tokens):
        self.submit(f"{system}<|user|>{' '.join(said)}<|end|><|assistant|>", max_tokens)

    @precondition(lambda self: self.history)
    @rule(which=st.integers(0, 9), max_tokens=st.integers(1, 20))
    def next_turn(self, which, max_tokens):
        self.submit(follow_up(self.history[-1 - which % len(self.history)]), max_tokens)

    @precondition(lambda self: self.history)
    @rule(which=st.integers(0, 9), cut=st.integers(0, 12))
    def retry_or_edit(self, which, cut):
        text = self.history[-1 - which % len(self.history)].text
        self.submit(text[: len(text) - cut], 6)

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 99))
    def cancel(self, which):
        self.rig.scheduler.cancel(self.jobs[which % len(self.jobs)].id, "client")

    @rule(count=st.integers(1, 20))
    def steps(self, count):
        for _ in range(count):
            self.take(self.rig.step())

    @rule(count=st.integers(1, 4))
    def store_works(self, count):
        for _ in range(count):
            self.rig.store.work()

    @precondition(lambda self: self.files)
    @rule(which=st.integers(0, 99))
    def file_goes_bad(self, which):
        self.rig.store.broken.add(sorted(self.files)[which % len(self.files)])

    @rule(really=st.integers(0, 5))
    def device_fails(self, really):
        self.rig.backend.fail_next(really == 5)

    @rule(in_order=st.booleans())
    def restart(self, in_order):
        if in_order:
            self.rig.scheduler.stop(drain=False)
            self.finish()
            self.rig.scheduler.save_all()
            while self.rig.store.work():
                pass
        self.begin()

    def take(self, events) -> None:
        for event in events:
            if isinstance(event, Ended) and event.reason in ("stop", "length"):
                job = next(job for job in self.jobs if job.id == event.job)
                assert correct(self.rig, job), "an answer that its tokens alone do not give"
                self.history.append(job)

    def finish(self) -> None:
        for _ in range(3000):
            if not self.rig.scheduler.busy:
                return
            if self.rig.scheduler.blocked and not self.rig.store.woke:
                assert self.rig.store.work(), "it waits for nothing"
            self.take(self.rig.step())
        raise AssertionError("it never ends")

    @invariant()
    def files_hold_their_text(self):
        for text, file in self.files.items():
            assert TEXT.render(file.tokens) == text

    def teardown(self) -> None:
        self.rig.backend.fail_next(0)
        self.finish()


class ChainedMachine(Machine):
    """The same over a device that works on its own."""

    chains = True


class CrampedMachine(Machine):
    """Three sessions over little more than one context's pages: they give way, are parked and come back, and the store has to wait too."""

    slots = 3
    pool: ClassVar[dict[str, int]] = {"page_tokens": 16, "pages": 16}


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAnyOrderChained = ChainedMachine.TestCase
TestAnyOrderChained.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAnyOrderCramped = CrampedMachine.TestCase
TestAnyOrderCramped.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
