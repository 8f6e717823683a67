"""The ladder through the scheduler: who gets which slot, what is kept there, and what is told about it.

Holds j (dispatch), k (the required slot) and l (who gets status 409) of the routing contract; see test_ladder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from scheduler_rig import Reader, Rig, checkpoint, make_job, options

from scheduler.backend import Sampled, Verdict
from scheduler.bindings import Bindings, Continuation, Image, Keys
from scheduler.fake import FakeBackend, FakeText
from scheduler.reuse import LADDER
from scheduler.router import Router
from scheduler.slots import Slot

pytestmark = pytest.mark.usefixtures("either_device")

WORDS = FakeText()
OPEN = "<|assistant|>"
SYSTEM = "<|system|>" + "you are a careful worker. " * 4 + "<|end|>"


def user(text: str) -> str:
    return f"<|user|>{text}<|end|>{OPEN}"


def say(*answers: tuple[str, str]):
    """A script: after a history whose text ends with the first of a pair the second is said, letter by letter."""
    end = WORDS.tokenise("<|end|>")

    def script(history: Sequence[int]) -> int | None:
        text = WORDS.render(history)
        for asked, answer in answers:
            at = text.rfind(asked)
            if at >= 0 and answer.startswith(text[at + len(asked) :]):
                rest = answer[len(text) - at - len(asked) :]
                return WORDS.tokenise(rest[0])[0] if rest else end[0]
        return None

    return script


def turn(rig: Rig, prompt: str, *, keys: Keys | None = None, **rest):
    """One turn to its own end, with the keys its API would give."""
    rest.setdefault("max_tokens", 60)
    return rig.answer(prompt, keys=None if keys is None else lambda: keys, **rest)


CALLS = frozenset({"call_1", "call_2"})


def asked_for_tools(rig: Rig, api: str, **rest):
    """A turn that ends in two calls, written in bytes that its client will not send back."""
    return turn(rig, SYSTEM + user("look"), api=api, keys=Keys(CALLS), **rest)


def results(head: str, *, calls=CALLS, api: str, **rest):
    """The next request of a client that writes the calls in its own way."""
    suffix = "<|end|><|user|>found it<|end|>" + OPEN
    text = head + suffix
    return text, {"api": api, "continues": Continuation(calls, len(head)), "generation_from": len(text) - len(OPEN), **rest}


TOOLS = (user("look"), "call{ a : 1 } call{ b : 2 }")
REWRITTEN = SYSTEM + user("look") + 'call{"a":1} call{"b":2}'


def test_j_an_alien_goes_to_the_empty_slot_1():
    rig = Rig()
    rig.answer(list(range(4, 90)))
    alien = rig.answer(list(range(10, 90)))
    assert (rig.routed(alien).slot, rig.routed(alien).victim) == (1, "empty")


# k


def bound_router(*bindings: Bindings | None) -> Router:
    slots = [Slot(i, checkpoint=checkpoint(range(4, 54)), last_used=0.0, bindings=one) for i, one in enumerate(bindings)]
    return Router(slots, FakeBackend(len(slots), 200), options())


def continuing(api: str, calls=CALLS, **rest):
    return make_job(1, "result", api=api, continues=Continuation(frozenset(calls), 0), **rest)


@pytest.mark.parametrize("api", ["responses", "anthropic"])
def test_k_calls_without_a_history_name_the_slot_that_made_them(api):
    router = bound_router(None, Bindings(api, Keys(CALLS), 50, 0), Bindings(api, Keys(frozenset({"other"})), 50, 0))
    assert router.required_slot(continuing(api, needs_live_state=True)) == 1
    assert router.required_slot(continuing(api, {"unknown"}, needs_live_state=True)) is None
    assert router.required_slot(continuing(api)) is None  # with a history any slot will do
    placement = router.place(continuing(api, needs_live_state=True), 0.0)
    assert placement is not None
    assert (placement.slot.id, placement.found.reuse.tier) == (1, f"{api}-tool-output")


@pytest.mark.parametrize("stale", [Bindings("responses", Keys(CALLS), 49, 0), Bindings("responses", Keys(CALLS), 50, 1)])
def test_k_bindings_that_do_not_hold_name_no_slot(stale):
    assert bound_router(stale).required_slot(continuing("responses", needs_live_state=True)) is None


# l


@pytest.mark.parametrize("materialised", [True, False])
@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize("api", ["responses", "anthropic", "chat"])
def test_l_only_a_request_that_needs_live_state_and_gets_none_is_told_so(api, needed, materialised):
    name = f"{api}-tool-output"
    ladder = LADDER if materialised else [
        dataclasses.replace(tier, materialise=lambda hold: None) if tier.name == name else tier for tier in LADDER
    ]  # fmt: skip
    rig = Rig(slots=1, script=say(TOOLS), ladder=ladder)
    asked_for_tools(rig, api)
    live = list(rig.backend.tokens(0))
    text, rest = results("", api=api, needs_live_state=needed)
    job = rig.answer(text, **rest)
    if needed and not (materialised and api != "chat"):  # a chat always carries its history, so no tier of its promises this
        name = {"responses": "Responses", "anthropic": "Anthropic", "chat": "live"}[api]
        history = "input" if api == "responses" else "messages"
        ended = rig.ended(job)
        assert (ended.reason, ended.status) == ("error", 409)
        assert ended.message == f"{name} continuation state is not available; retry by replaying the full {history} history"
        assert list(rig.backend.tokens(0)) == live  # which is still there for whoever can use it
    elif materialised:
        assert (rig.routed(job).tier, rig.routed(job).cached_tokens) == (name, len(live))
    else:
        assert (rig.routed(job).tier, rig.routed(job).fell_from, rig.routed(job).cached_tokens) == ("none", name, 0)
        assert job.generated == rig.alone(job)


@pytest.mark.parametrize("api", ["responses", "anthropic"])
def test_l_unknown_calls_are_routed_and_told_so_by_whoever_is_free(api):
    rig = Rig(slots=2, script=say(TOOLS))
    asked_for_tools(rig, api)
    text, rest = results("", api=api, calls=frozenset({"call_9"}), needs_live_state=True)
    job = rig.answer(text, **rest)
    assert rig.ended(job).status == 409


# what is kept


@pytest.mark.parametrize("api", ["responses", "anthropic", "chat"])
def test_tool_results_cost_only_themselves_however_the_calls_are_written(api):
    rig = Rig(script=say(TOOLS))
    first = asked_for_tools(rig, api)
    rig.answer("someone else", max_tokens=3)
    live = list(rig.backend.tokens(0))
    rig.text.tokenised.clear()
    text, rest = results(REWRITTEN, api=api)
    job = rig.answer(text, **rest)
    assert (rig.routed(job).slot, rig.routed(job).tier, rig.routed(job).cached_tokens) == (0, f"{api}-tool-output", len(live))
    assert rig.text.tokenised[0] == text[len(REWRITTEN) :]
    assert job.prompt == [*live, *rig.text.tokenise(text[len(REWRITTEN) :])]
    assert live == [*first.prompt, *first.generated]
    assert job.generated == rig.alone(job)


@pytest.mark.parametrize("can_rewind", [True, False])
def test_a_retry_of_tool_results_costs_only_the_opening_of_the_answer(can_rewind):
    rig = Rig(slots=1, script=say(TOOLS), can_rewind=can_rewind)
    asked_for_tools(rig, "chat")
    text, rest = results(REWRITTEN, api="chat")
    job = rig.answer(text, **rest)
    again = rig.answer(text, **rest)
    assert rig.routed(again).tier == "rewind-point"
    assert again.prompt == job.prompt
    assert rig.routed(again).cached_tokens == len(job.prompt) - 1  # the opening is one token
    assert again.generated == job.generated


def test_an_edit_after_tool_results_keeps_the_turns_before_it():
    rig = Rig(slots=1, script=say(TOOLS))
    asked_for_tools(rig, "chat")
    live = len(rig.backend.tokens(0))
    text, rest = results(REWRITTEN, api="chat")
    rig.answer(text, **rest)
    edited = REWRITTEN + "<|end|><|user|>found nothing<|end|>" + OPEN
    job = rig.answer(edited)
    assert (rig.routed(job).tier, rig.routed(job).cached_tokens, rig.routed(job).victim) == ("rewind-point", live, "none")
    assert WORDS.render(job.prompt).endswith("found nothing<|end|>" + OPEN)
    assert job.generated == rig.alone(job)


class StopsAfterCalls(Reader):
    """An output that ends the answer at the last character of its calls, before any stop token."""

    def push(self, sampled: Sampled) -> Verdict | None:
        verdict = super().push(sampled)
        return Verdict("tool_calls", len(self.tokens)) if self.text == TOOLS[1] else verdict


@pytest.mark.parametrize("api", ["responses", "anthropic", "chat"])
def test_results_of_calls_that_ended_the_answer_follow_the_last_token_drawn(api):
    rig = Rig(script=say(TOOLS))
    first = asked_for_tools(rig, api, output=StopsAfterCalls(), steered=True)
    assert rig.ended(first).reason == "tool_calls"
    live = len(rig.backend.tokens(0))
    text, rest = results(REWRITTEN, api=api)
    job = rig.answer(text, **rest)
    assert (rig.routed(job).tier, rig.routed(job).cached_tokens) == (f"{api}-tool-output", live)
    assert WORDS.render(job.prompt) == SYSTEM + TOOLS[0] + TOOLS[1] + text[len(REWRITTEN) :] == job.prompt_text
    assert job.generated == rig.alone(job)


def test_a_shown_answer_that_ended_with_a_call_is_continued_by_its_last_token():
    rig = Rig(script=say(TOOLS))
    shown = SYSTEM + "<|user|>look<|end|>" + TOOLS[1]
    turn(rig, SYSTEM + TOOLS[0], keys=Keys(visible=shown), output=StopsAfterCalls(), steered=True)
    job = rig.answer(shown + "<|end|>" + user("and?"))
    assert rig.routed(job).tier == "thinking-visible"
    assert WORDS.render(job.prompt) == SYSTEM + TOOLS[0] + TOOLS[1] + "<|end|>" + user("and?")


def test_a_client_that_leaves_the_reasoning_out_continues_where_it_was():
    rig = Rig(slots=2, script=say((user("why?"), "hm, let me see. because"), (user("and?"), "well. so")))
    prompt = SYSTEM + user("why?")
    shown = prompt + "because"
    turn(rig, prompt, keys=Keys(visible=shown), generation_from=len(prompt) - len(OPEN))
    second = shown + "<|end|>" + user("and?")
    live = len(rig.backend.tokens(0))
    job = turn(rig, second, keys=Keys(visible=second + "so"), generation_from=len(second) - len(OPEN))
    assert (rig.routed(job).tier, rig.routed(job).cached_tokens) == ("thinking-visible", live)
    assert "let me see" in WORDS.render(job.prompt)
    live = len(rig.backend.tokens(0))
    third = second + "so<|end|>" + user("then?")
    onward = rig.answer(third)
    assert (rig.routed(onward).tier, rig.routed(onward).cached_tokens) == ("thinking-visible", live)
    assert rig.scheduler.stats().slots[1].live_tokens == 0


def test_a_client_that_sends_the_reasoning_back_finds_it_by_its_true_text():
    rig = Rig(slots=1, script=say((user("why?"), "hm, let me see. because"), (user("and?"), "well. so")))
    prompt = SYSTEM + user("why?")
    turn(rig, prompt, keys=Keys(visible=prompt + "because"))
    second = prompt + "because<|end|>" + user("and?")
    turn(rig, second)
    whole = prompt + "hm, let me see. because<|end|>" + user("and?") + "well. so<|end|>" + user("then?")
    live = len(rig.backend.tokens(0))
    job = rig.answer(whole)
    assert rig.routed(job).tier == "memory-text"
    assert rig.routed(job).cached_tokens == live
    assert WORDS.render(job.prompt) == whole


@pytest.mark.parametrize("ending", ["length", "abort", "other"])
def test_keys_are_gone_after_anything_but_an_answer_that_continues_them(ending):
    rig = Rig(slots=1, script=say(TOOLS))
    if ending == "length":
        asked_for_tools(rig, "chat", max_tokens=5)
    elif ending == "abort":
        job = rig.submit(SYSTEM + user("look"), max_tokens=60, keys=lambda: Keys(CALLS))
        for _ in range(5):
            rig.step()
        rig.scheduler.cancel(job.id, "client")
        rig.run()
    else:
        asked_for_tools(rig, "chat")
        rig.answer("someone else", max_tokens=3)
    text, rest = results(REWRITTEN, api="chat")
    job = rig.answer(text, **rest)
    assert rig.routed(job).tier != "chat-tool-output"
    assert job.generated == rig.alone(job)


def test_keys_that_cannot_be_told_cost_the_tier_not_the_answer():
    def broken():
        raise RuntimeError("no keys")

    rig = Rig(slots=1, script=say(TOOLS))
    first = rig.answer(SYSTEM + user("look"), max_tokens=60, keys=broken)
    assert rig.ended(first).reason == "stop"
    text, rest = results(REWRITTEN, api="chat")
    assert rig.routed(rig.answer(text, **rest)).tier != "chat-tool-output"


def test_a_suffix_with_an_image_falls_through():
    rig = Rig(slots=1, script=say(TOOLS))
    asked_for_tools(rig, "chat")
    text, rest = results(REWRITTEN, api="chat")
    job = rig.answer(text, **rest, images=(Image("cat", 3, 2, len(REWRITTEN) + 4, 2),))
    assert (rig.routed(job).tier, rig.routed(job).fell_from) == ("none", "chat-tool-output")


# marks


@pytest.mark.parametrize(("can_rewind", "marks"), [(False, 1), (True, 0)])
def test_a_state_that_cannot_be_cut_is_marked_before_the_last_token_of_a_prompt(can_rewind, marks, monkeypatch):
    marked = []
    rig = Rig(slots=1, can_rewind=can_rewind)
    mark = rig.backend.mark
    monkeypatch.setattr(rig.backend, "mark", lambda slot: (marked.append(len(rig.backend.tokens(slot))), mark(slot)))
    job = rig.answer(SYSTEM + user("once"))
    assert marked == [len(job.tokens) - 1] * marks
    again = rig.answer(SYSTEM + user("once"))
    assert (rig.routed(again).tier, rig.routed(again).cached_tokens) == ("memory-rewind", len(job.tokens) - 1)
    assert again.generated == job.generated
    rig.answer(SYSTEM + user("once"))
    assert rig.routed(again).tier == "memory-rewind"  # and once more: the point is still there


def test_where_the_last_message_ends_is_known_the_mark_is_there():
    rig = Rig(slots=1, can_rewind=False)
    prompt = SYSTEM + user("once")
    opening = OPEN + "\nthink:"
    first = rig.answer(prompt[: -len(OPEN)] + opening, generation_from=len(prompt) - len(OPEN))
    marked = len(first.tokens) - len(WORDS.tokenise(opening))
    other = rig.answer(prompt[: -len(OPEN)] + user("and twice"), generation_from=len(prompt) - len(OPEN) + 5)
    assert (rig.routed(other).tier, rig.routed(other).cached_tokens) == ("rewind-point", marked)
    assert other.generated == rig.alone(other)


# telling


def test_a_request_that_reuses_nothing_is_told_where_it_left_the_nearest_session():
    rig = Rig(slots=2)
    rig.answer("zzzz", max_tokens=1)
    rig.answer("abcdefghijklmnopqrstuvwxyz", max_tokens=1)
    job = rig.answer("abcdefghijXlmnopqrstuvwxyz", max_tokens=1)
    told = rig.routed(job).divergence
    assert told is not None
    assert (told.slot, told.at, told.held, told.asked) == (1, 10, "cdefghijklmnopqrs", "cdefghijXlmnopqrs")
    assert told.live == 26
    assert rig.routed(rig.answer("0", max_tokens=1)).divergence is None  # nobody is near


def test_a_cut_is_told_and_a_continuation_has_nothing_to_tell():
    rig = Rig(slots=1)
    first = rig.answer("abcdef" * 60, max_tokens=3, ignore_eos=True)
    onward = rig.answer([*rig.backend.tokens(0), 9], max_tokens=1)
    assert rig.routed(onward).divergence is None
    assert rig.routed(first).divergence is None
    cut = rig.answer("abcdef" * 50 + "x" * 9, max_tokens=1)
    assert rig.routed(cut).tier == "memory-rewind"
    told = rig.routed(cut).divergence
    assert told is not None
    assert (told.at, told.asked[8]) == (rig.routed(cut).cached_tokens, "x")
