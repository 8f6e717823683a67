"""Conversations whose clients send back less than was sampled, or write it in their own way, go on, retry, edit, go back and are
cancelled in any order: what a request is answered from always is its conversation, and equals a cold run of those tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from scheduler_rig import TEXT, Reader, Rig

from scheduler import Ended, Job, Routed
from scheduler.bindings import Continuation, Keys
from scheduler.fake import END

SLOTS, CTX = 3, 400
OPEN = "<|assistant|>"
APIS = ("chat", "responses", "anthropic", "completions")
STYLES = ("calls", "less", "all")
WORDS = ("the thing", "another", "then", "in", "er", "x")


@dataclass(frozen=True)
class Answer:
    """What was sampled, and what the client makes of it."""

    said: str
    shown: str
    call: str | None  # its id, when the answer is a call


@dataclass(frozen=True)
class Talk:
    """One conversation as its client holds it. `asked[i]` is answered by `answers[i]`; the last may not be yet."""

    api: str
    style: str  # what comes back: calls in the client's own writing, less than was said, all of it
    asked: tuple[str, ...]
    answers: tuple[Answer, ...] = ()

    @property
    def text(self) -> str:
        """What the client sends."""
        parts = [ask + answer.shown for ask, answer in zip(self.asked, self.answers, strict=False)]
        return "".join(parts) + "".join(self.asked[len(self.answers) :])

    def spelt_by(self, text: str) -> bool:
        """Whether `text` is this conversation with each answer as it was said or as it is shown."""
        places = {0}
        for i, ask in enumerate(self.asked):
            places = {at + len(ask) for at in places if text.startswith(ask, at)}
            if i < len(self.answers):
                forms = {self.answers[i].said, self.answers[i].shown}
                places = {at + len(form) for at in places for form in forms if text.startswith(form, at)}
        return len(text) in places


@dataclass
class Sent:
    """A request under way or answered."""

    talk: Talk
    job: Job
    alone: bool  # its text holds the results only
    after: Talk | None = field(default=None)


def shown(said: str, style: str) -> str:
    """What the client sends back of an answer."""
    return {"calls": f"[{said.upper()}]", "less": said[len(said) // 2 :], "all": said}[style]


class Machine(RuleBasedStateMachine):
    changes: ClassVar[dict[str, object]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(
            SLOTS, CTX, mixed_prefill_quantum=16, idle_prefill_quantum=32, rewind_min_tokens=24,
            script=lambda history: END if len(history) % 11 == 0 else None, **self.changes,
        )  # fmt: skip
        self.sent: dict[int, Sent] = {}
        self.tiers: set[str] = set()

    def send(self, talk: Talk, max_tokens: int, alone: bool = False) -> None:
        """Submit the conversation, or with `alone` no more of it than the results of its last calls."""
        text = talk.text
        suffix = talk.asked[-1]
        call = talk.answers[-1].call if talk.answers else None
        if not 0 < len(TEXT.tokenise(text)) < CTX - 40:
            return
        number = len(self.sent) + 1
        output = Reader()

        def keys() -> Keys:
            if talk.style == "calls":
                return Keys(frozenset({f"call_{number}"}))
            return Keys(visible=text + shown(output.text, talk.style) if talk.style == "less" else None)

        before = 0 if alone else len(text) - len(suffix)
        text = suffix if alone else text
        job = self.rig.submit(
            text, api=talk.api, max_tokens=max_tokens, sampling=number % 4, output=output, keys=keys, needs_live_state=alone,
            continues=Continuation(frozenset({call}), before) if call else None,
            generation_from=len(text) - len(OPEN),
        )  # fmt: skip
        assert job.id == number
        self.sent[number] = Sent(talk, job, alone)

    lengths = st.sampled_from([1, 8, 20, 20, 20])

    @rule(api=st.sampled_from(APIS), style=st.sampled_from(STYLES), word=st.sampled_from(WORDS), max_tokens=lengths)
    def begin(self, api, style, word, max_tokens):
        self.send(Talk(api, style, (f"<|system|>be brief<|end|><|user|>{word}<|end|>{OPEN}",)), max_tokens)

    @property
    def answered(self) -> list[Talk]:
        return [sent.after for sent in self.sent.values() if sent.after is not None]

    @precondition(lambda self: self.answered)
    @rule(which=st.integers(0, 99), word=st.sampled_from(WORDS), max_tokens=lengths, alone=st.integers(0, 3), waits=st.booleans())
    def go_on(self, which, word, max_tokens, alone, waits):
        """Mostly where somebody was last."""
        if waits:
            self.steps(60)
        talks = self.answered
        talk = talks[-1 - min(which // 20, len(talks) - 1)]
        results = replace(talk, asked=(*talk.asked, f"<|end|><|user|>{word}<|end|>{OPEN}"))
        self.send(results, max_tokens, alone == 0 and talk.answers[-1].call is not None)

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 99), max_tokens=lengths)
    def retry(self, which, max_tokens):
        sent = self.sent[len(self.sent) - min(which // 20, len(self.sent) - 1)]
        self.send(sent.talk, max_tokens, sent.alone)

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 99), word=st.sampled_from(WORDS), max_tokens=lengths)
    def edit_last_message(self, which, word, max_tokens):
        talk = self.sent[len(self.sent) - min(which // 20, len(self.sent) - 1)].talk
        edited = talk.asked[-1].replace("<|user|>", f"<|user|>{word} ")
        self.send(replace(talk, asked=(*talk.asked[:-1], edited)), max_tokens)

    @precondition(lambda self: self.answered)
    @rule(which=st.integers(0, 99), turns=st.integers(1, 3), word=st.sampled_from(WORDS), max_tokens=lengths)
    def go_back(self, which, turns, word, max_tokens):
        """Some turns back, and on from there in another direction."""
        talk = self.answered[which % len(self.answered)]
        kept = max(1, len(talk.answers) - turns)
        asked = (*talk.asked[:kept], f"<|end|><|user|>no, {word}<|end|>{OPEN}")
        self.send(replace(talk, asked=asked, answers=talk.answers[:kept]), max_tokens)

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 99))
    def cancel(self, which):
        self.rig.scheduler.cancel(1 + which % len(self.sent), "client")

    @rule(seconds=st.sampled_from([1.0, 3600.0]))
    def time_passes(self, seconds):
        self.rig.clock.advance(seconds)

    @rule(really=st.integers(0, 9))
    def device_fails_next_time(self, really):
        self.rig.backend.fail_next(really == 9)

    @rule(count=st.integers(1, 60))
    def steps(self, count):
        for _ in range(count):
            for event in self.rig.step():
                if isinstance(event, Routed):
                    self.tiers.add(event.tier)
                    assert event.cached_tokens < len(self.sent[event.job].job.prompt)
                elif isinstance(event, Ended):
                    self.take_end(self.sent[event.job], event)

    def take_end(self, sent: Sent, event: Ended) -> None:
        job = sent.job
        if job.slot is None:
            if event.reason == "error":
                assert sent.alone
                assert event.status == 409
            return
        spelt = TEXT.render(job.prompt)
        assert sent.talk.spelt_by(spelt), job.tier
        if job.tier in ("none", "memory-token", "memory-rewind"):
            assert job.prompt == job.tokens
        assert not sent.alone or job.tier.endswith("-tool-output")
        cold = self.rig.backend.answer(job.prompt, job.sampling, job.max_tokens, job.stop_tokens)
        assert job.output.tokens == cold[: len(job.output.tokens)]
        if event.reason in ("stop", "length"):
            assert job.generated == cold
            call = f"call_{job.id}" if sent.talk.style == "calls" and event.reason == "stop" else None
            said = job.output.text
            answer = Answer(said, shown(said, sent.talk.style), call)
            sent.after = replace(sent.talk, answers=(*sent.talk.answers, answer))

    @invariant()
    def nothing_contradicts_itself(self):
        self.rig.scheduler.check()

    def teardown(self):
        self.rig.backend.fail_next(0)
        for _ in range(200):
            if not self.rig.scheduler.busy:
                break
            self.steps(10)
        assert not self.rig.scheduler.busy
        for slot in range(SLOTS):
            live = self.rig.backend.tokens(slot)
            owners = [sent.job for sent in self.sent.values() if sent.job.slot == slot]
            assert not live or any(live == (job.prompt + job.generated)[: len(live)] for job in owners)


class RecurrentMachine(Machine):
    """Sessions that can only be cut to their marked point."""

    changes: ClassVar = {"can_rewind": False}


class ChainedMachine(Machine):
    """A device that works on its own."""

    changes: ClassVar = {"chains": True}


for machine in (Machine, RecurrentMachine, ChainedMachine):
    machine.TestCase.settings = settings(
        max_examples=80, stateful_step_count=30, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip
TestAnyConversation = Machine.TestCase
TestAnyConversationRecurrent = RecurrentMachine.TestCase
TestAnyConversationChained = ChainedMachine.TestCase


def test_the_machine_meets_every_rung():
    """Its rules reach all tiers, or it would show nothing of them."""
    met: set[str] = set()

    class Seen(Machine):
        def teardown(self):
            super().teardown()
            met.update(self.tiers)

    class SeenRecurrent(Seen):
        changes: ClassVar = {"can_rewind": False}

    for machine in (Seen, SeenRecurrent):
        run_state_machine_as_test(machine, settings=settings(Machine.TestCase.settings, max_examples=150))
    assert met >= {
        "responses-visible", "responses-tool-output", "anthropic-tool-output", "chat-tool-output", "memory-rewind",
        "memory-token", "thinking-visible", "memory-text", "rewind-point", "none",
    }  # fmt: skip
