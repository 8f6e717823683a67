"""From a request's messages to the slot it continues: answers that come back without their reasoning, calls, refusals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import ds4batch.messages as m
from ds4batch.engine.service import Service
from ds4batch.engine.visible import next_text, shown
from scheduler import Options
from scheduler.fake import END, FakeBackend, FakeText, ManualClock

OPEN = "<|assistant|>"
SAID = "<think>hm, let me see</think>\n\nbecause"


@pytest.mark.parametrize(
    ("answer", "rest"),
    [
        ("because", "because"),
        (SAID, "because"),
        ("let me see</think>\nbecause ", "because "),
        ("<think>never closed", None),
        ("<think>a</think>b<think>c", None),
        ("", ""),
    ],
)
def test_an_answer_is_shown_behind_its_reasoning(answer: str, rest: str | None) -> None:
    assert shown(answer) == rest


def test_the_next_request_begins_as_the_template_will_write_it() -> None:
    assert next_text("why?<a><think>", m.Visible(7, "x"), SAID) == "why?<a>xbecause"
    assert next_text("why?", m.Visible(4, ""), "<think>open") is None


class Words(FakeText):
    """The fake vocabulary as a model's."""

    stop_ids = frozenset({END})
    special_ids = frozenset(range(4))

    def token_bytes(self, token: int) -> bytes:
        return self.render([token]).encode()


class Desk:
    def __init__(self, answer: str) -> None:
        self.words = Words()
        said = [self.words.tokenise(letter)[0] for letter in answer]  # in single letters, as no tokeniser would

        def script(history: Sequence[int]) -> int:
            begun = len(history) - 1 - max(i for i, token in enumerate(history) if token == self.words.tokenise(OPEN)[0])
            return said[begun] if begun < len(said) else END

        options = Options(mixed_prefill_quantum=32, idle_prefill_quantum=128, itl_budget=0.1, max_queue=4)
        self.service = Service(FakeBackend(2, 2000, script=script), self.words, ManualClock(), 2, options)
        self.last = 0

    def ask(self, text: str, **rest: object) -> m.Routed:
        self.last += 1
        tokens = self.words.tokenise(text)
        self.service.handle(
            m.Submit(id=self.last, tokens=tokens, text=text, max_tokens=80, sampling=m.Sampling(), arrival=0.0, **rest)  # type: ignore[arg-type]
        )
        events: list[m.Event] = []
        while self.service.busy:
            events += self.service.step().events
        return next(event for event in events if isinstance(event, m.Routed))


ASKED = "<|user|>why?<|end|>" + OPEN


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
        slot=0, at=3, live=14, held="<|user|>why?<|end|><|assistant|>becau", asked="<|user|>who?<|end|><|assistant|>"
    )
    assert m.decode_from_engine(m.frame(m.Report(events=[routed]))[m.HEADER.size :]) == m.Report(events=[routed])


def test_results_of_calls_reach_the_scheduler() -> None:
    desk = Desk("call")
    desk.ask(ASKED)
    text = ASKED + "[call]<|end|>" + ASKED
    routed = desk.ask(text, continues=m.Continues(["call_1"], len(ASKED) + 6), generation_from=len(text) - len(OPEN))
    assert routed.tier != "chat-tool-output"  # no answer has ids yet, so nothing can be continued by them
    assert routed.fell_from is None
