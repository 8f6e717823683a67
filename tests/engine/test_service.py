"""From a request's messages to the slot it continues: answers that come back without their reasoning, calls, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest

import ds4batch.messages as m
from ds4batch.chat.events import Turn
from ds4batch.engine.service import Service
from scheduler import Options
from scheduler.fake import END, FakeBackend, FakeText, ManualClock
from scheduler.fake_drafts import always

OPEN = "<|assistant|>"
SAID = "<think>hm, let me see</think>\n\nbecause"
READING = m.Reading(grammar="hermes", thinking=False, tools={"look": ["at"]})
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'


class Words(FakeText):
    """The fake vocabulary as a model's."""

    stop_ids = frozenset({END})
    special_ids = frozenset(range(4))

    def token_bytes(self, token: int) -> bytes:
        return self.render([token]).encode()


class Desk:
    """Asks a service whose model gives one answer to everything."""

    def __init__(self, answer: str, drafts: int = 0) -> None:
        self.words = Words()
        said = [self.words.tokenise(letter)[0] for letter in answer]  # in single letters, as no tokeniser would

        def script(history: Sequence[int]) -> int:
            begun = len(history) - 1 - max(i for i, token in enumerate(history) if token == self.words.tokenise(OPEN)[0])
            return said[begun] if begun < len(said) else END

        options = Options(mixed_prefill_quantum=32, idle_prefill_quantum=128, itl_budget=0.1, max_queue=4, drafts=drafts)
        backend = FakeBackend(2, 2000, script=script, guesses=always() if drafts else None)
        self.service = Service(backend, self.words, ManualClock(), 2, options)
        self.last = 0
        self.turn = Turn()  # of the last answer
        self.finished: m.Finished | None = None

    def ask(self, text: str, reading: m.Reading | None = READING, **rest: Any) -> m.Routed:
        """How the request was routed; its answer is in `turn` and `finished`."""
        self.last += 1
        rest = {"max_tokens": 200, "sampling": m.Sampling(), **rest}
        self.service.handle(
            m.Submit(id=self.last, tokens=self.words.tokenise(text), text=text, arrival=0.0, reading=reading, **rest)
        )
        events: list[m.Event] = []
        self.reports: list[m.Report] = []
        while self.service.busy:
            self.reports.append(self.service.step())
            events += self.reports[-1].events
        self.finished = next(event for event in events if isinstance(event, m.Finished))
        self.turn = Turn()
        for event in events:
            self.turn.add(event.events if isinstance(event, m.Delta) else [])
        self.turn.add(self.finished.rest)
        return next(event for event in events if isinstance(event, m.Routed))


ASKED = "<|user|>why?<|end|>" + OPEN


@pytest.mark.parametrize(
    ("answer", "opened", "rest"),
    [
        ("because", False, "because"),
        (SAID, False, "because"),
        ("let me see</think>\nbecause ", True, "because "),
        ("never closed", True, None),
        ("<think>never closed", False, None),
        ("a</think>", True, ""),
        ("a</think>b<think>c", True, "b<think>c"),
        ("a</think>b" + CALL, True, "b" + CALL),
    ],
)
def test_the_next_request_is_known_by_the_answer_behind_its_reasoning(answer: str, opened: bool, rest: str | None) -> None:
    desk = Desk(answer)
    desk.ask(ASKED, m.Reading(grammar="hermes", thinking=opened, tools={"look": []}), visible=m.Visible(len(ASKED) - 1, "x"))
    routed = desk.ask(f"{ASKED[:-1]}x{rest or ''}<|end|>{ASKED}")
    whole = len(desk.words.tokenise(ASKED)) + len(answer)
    assert (routed.tier, routed.cached_tokens) == (("none", 0) if rest is None else ("thinking-visible", whole))


@pytest.mark.parametrize(
    ("trimmed", "answer", "shown"),
    [
        ("", "r</think>\n so ", "\n so "),
        ("start", "r</think>\n so ", "so "),
        ("both", "r</think>\n so ", "so"),
        ("start", "r</think>\n so " + CALL, "so" + " " + CALL),
    ],
)
def test_an_answer_is_known_again_without_the_space_that_its_family_takes_away(
    trimmed: Literal["", "start", "both"], answer: str, shown: str
) -> None:
    desk = Desk(answer)
    visible = m.Visible(len(ASKED) - 1, "x", trimmed)
    desk.ask(
        ASKED, m.Reading(grammar="glm" if CALL not in answer else "hermes", thinking=True, tools={"look": []}), visible=visible
    )
    routed = desk.ask(f"{ASKED[:-1]}x{shown}<|end|>{ASKED}")
    assert routed.tier == "thinking-visible"


@pytest.mark.parametrize(("stop", "tier"), [([], "thinking-visible"), (["caus"], "none")])
def test_a_conversation_goes_on_without_its_reasoning_unless_it_was_cut(stop: list[str], tier: str) -> None:
    desk = Desk(SAID)
    desk.ask(ASKED, visible=m.Visible(len(ASKED), ""), stop=stop)
    routed = desk.ask(ASKED + ("be" if stop else "because") + "<|end|>" + ASKED)
    assert routed.tier == tier
    assert (routed.cached_tokens > 0) == (tier != "none")


def test_the_front_is_told_where_a_prompt_left_the_nearest_session() -> None:
    desk = Desk("because")
    desk.ask(ASKED)
    routed = desk.ask(ASKED.replace("why", "who"))
    assert routed.divergence == m.Divergence(
        slot=0,
        at=3,
        live=14,
        held="<|user|>why?<|end|><|assistant|>becau",
        asked="<|user|>who?<|end|><|assistant|>",
        held_tokens=desk.words.tokenise(ASKED) + [desk.words.tokenise(letter)[0] for letter in "becau"],
    )
    assert m.decode_from_engine(m.frame(m.Report(events=[routed]))[m.HEADER.size :]) == m.Report(events=[routed])


def results(calls: list[str]) -> dict[str, Any]:
    """A request that brings results, of a client that writes the call in its own way."""
    text = ASKED + "[call]<|end|>" + ASKED
    return {"text": text, "continues": m.Continues(calls, len(ASKED) + 6), "generation_from": len(text) - len(OPEN)}


def test_results_of_calls_reach_the_scheduler() -> None:
    desk = Desk("call")
    desk.ask(ASKED)
    routed = desk.ask(**results(["call_1"]))
    assert routed.tier != "chat-tool-output"  # the answer made no calls, so nothing can be continued by them
    assert routed.fell_from is None


def test_results_of_all_calls_go_on_behind_them_and_those_of_some_do_not() -> None:
    for missing in (False, True):
        desk = Desk(f"I look.\n{CALL}\n{CALL}")
        desk.ask(ASKED)
        assert desk.finished is not None
        assert (desk.finished.reason, desk.finished.raw) == ("tool_calls", f"\n{CALL}\n{CALL}")
        ids = [call.id for call in desk.turn.complete_calls]
        assert len(set(ids)) == 2
        routed = desk.ask(**results(ids[missing:]))
        assert (routed.tier == "chat-tool-output") == (not missing)
        if not missing:
            assert routed.cached_tokens == len(desk.words.tokenise(ASKED)) + len(f"I look.\n{CALL}\n{CALL}")


def test_ids_begin_as_the_api_wants() -> None:
    desk = Desk(CALL)
    desk.ask(ASKED, m.Reading(grammar="hermes", thinking=False, tools={"look": []}, ids="toolu_"))
    assert desk.turn.complete_calls[0].id.startswith("toolu_")


@pytest.mark.parametrize("cut", [20, len(CALL) - 15], ids=["begun", "nameless"])
def test_a_call_that_cannot_be_read_is_text_and_continues_nothing(cut: int) -> None:
    desk = Desk(CALL[:-cut])
    desk.ask(ASKED, visible=m.Visible(len(ASKED), ""))
    assert desk.finished is not None
    assert (desk.finished.reason, desk.finished.raw, desk.turn.complete_calls) == ("stop", None, [])
    assert desk.turn.content == CALL[:-cut]
    assert bool(desk.finished.malformed) == (not desk.turn.calls)  # why, as long as nothing of it was reported
    assert desk.ask(f"{ASKED}{CALL[:-cut]}<|end|>{ASKED}").tier in ("memory-token", "memory-text")


def test_without_tools_or_a_reading_markup_is_text() -> None:
    desk = Desk(SAID + CALL)
    desk.ask(ASKED, None)
    assert (desk.turn, desk.finished and desk.finished.reason) == (Turn(), "stop")
    desk = Desk(SAID + CALL)
    desk.ask(ASKED, m.Reading(grammar="hermes", thinking=False))
    assert (desk.turn.reasoning, desk.turn.content, desk.turn.calls) == (["hm, let me see"], "because" + CALL, [])


def test_what_needs_a_session_that_is_gone_is_refused() -> None:
    desk = Desk(CALL)
    desk.service.handle(
        m.Submit(
            id=1, tokens=[1], text="<|user|>", max_tokens=9, sampling=m.Sampling(), arrival=0.0,
            api="responses", continues=m.Continues(["call_1"], 0), needs_live_state=True,
        )
    )  # fmt: skip
    (failed,) = (event for event in desk.service.step().events if isinstance(event, m.Failed))
    assert failed.status == 409
    assert "Responses continuation state" in failed.message


def test_tokens_that_came_together_are_told_together_and_their_drafts_are_counted() -> None:
    plain, desk = Desk(SAID + CALL), Desk(SAID + CALL, drafts=3)
    plain.ask(ASKED)
    desk.ask(ASKED)
    assert (desk.turn.content, desk.turn.reasoning) == (plain.turn.content, plain.turn.reasoning)
    assert desk.finished is not None
    assert plain.finished is not None
    assert (desk.finished.reason, desk.finished.completion_tokens) == ("tool_calls", plain.finished.completion_tokens)
    deltas = [[event for event in report.events if isinstance(event, m.Delta)] for report in desk.reports]
    assert all(len(found) <= 1 for found in deltas)
    assert max(found[0].tokens for found in deltas if found) == 4
    assert sum(found[0].tokens for found in deltas if found) == desk.finished.completion_tokens
    steps = [step for report in desk.reports for step in report.steps]
    assert sum(step.drafts for step in steps) == 3 * sum(step.checked_rows for step in steps) > 0
    stats = desk.reports[-1].stats
    assert stats is not None
    assert stats.drafts is not None
    assert sum(stats.drafts.decisions.values()) > 0
    assert plain.reports[-1].stats is not None
    assert plain.reports[-1].stats.drafts is None


def test_who_is_drafted_for() -> None:
    for rest, drafted in (
        ({}, True),
        ({"sampling": m.Sampling(temperature=1.0, seed=3)}, True),
        ({"sampling": m.Sampling(ignore_eos=True), "max_tokens": 30}, False),
    ):
        desk = Desk(SAID, drafts=2)
        desk.ask(ASKED, None, **rest)
        assert any(step.drafts for report in desk.reports for step in report.steps) == drafted


def test_the_front_is_told_what_was_drafted_for_a_request() -> None:
    desk = Desk("0123456789" * 8, drafts=2)
    desk.ask(ASKED, reading=None, max_tokens=60)
    assert desk.finished is not None
    steps = [step for report in desk.reports for step in report.steps]
    assert desk.finished.drafts == sum(step.drafts for step in steps) > 0
    assert desk.finished.drafts_accepted == sum(sum(step.accepted) for step in steps) > 0
