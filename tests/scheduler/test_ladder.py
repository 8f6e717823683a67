"""What each rung of the ladder finds in a checkpoint, without a scheduler. Letters are those of the routing contract:

a alien prompts, b extension by tokens, c by text, d and e staleness, f each live tier, g precedence, h populated bindings and an
alien, i images, j dispatch, k the required slot, l the 409 table, m round robin. Here stand a to c and e to i; d in
test_victim_scores, j, k and l in test_ladder_routing, m in test_interleave.
"""

import pytest
from scheduler_rig import TEXT, checkpoint, make_job, options

from scheduler.bindings import Bindings, Continuation, Image, Keys, Point, latest
from scheduler.options import IDLE_CAP
from scheduler.reuse import NOT_FOUND, Found, probe
from scheduler.slots import Slot
from scheduler.victims import score

OPTIONS = options()
SHOWN = "<|user|>why?<|end|><|assistant|>because<|end|>"
HELD = TEXT.tokenise("<|user|>why?<|end|><|assistant|>hm, let me see. because")
CALLS = frozenset({"call_a", "call_b"})


def look(held, job, bindings=None, can_truncate=lambda length: True) -> Found:
    return probe(held, job, can_truncate, OPTIONS, bindings=bindings)


def keys(api: str, *, calls=frozenset(), visible=None) -> Bindings:
    return Bindings(api, Keys(calls, visible), len(HELD), 1)


def held(**rest):
    return checkpoint(HELD, text=TEXT.render(HELD), **rest)


def results(api: str, calls=CALLS, suffix="<|end|>result<|assistant|>", head="<|user|>other words"):
    return make_job(1, head + suffix, api=api, continues=Continuation(calls, len(head)))


def ids(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


# a, b, e: scores follow what can be reused


def test_a_an_alien_scores_what_it_would_destroy():
    alien = make_job(1, ids(100) + ids(60, 5000))
    ranks = []
    for slot in (
        Slot(0, checkpoint=checkpoint(ids(160)), last_used=0.0),
        Slot(1, checkpoint=checkpoint(ids(101)), last_used=0.0),
    ):
        found = look(slot.checkpoint, alien)
        assert found is NOT_FOUND
        ranks.append(score(slot, found.reuse, 0.0, 3600.0))
    base = -2 - IDLE_CAP
    assert [*ranks, score(Slot(2), NOT_FOUND.reuse, 0.0, 3600.0)] == [base - 160, base - 101, 0]


def test_b_the_extended_checkpoint_scores_its_length_and_no_other_does():
    job = make_job(1, ids(101) + ids(10, 5000))
    slots = [Slot(i, checkpoint=checkpoint(ids(count)), last_used=0.0) for i, count in enumerate((160, 101))] + [Slot(2)]
    found = [look(slot.checkpoint, job).reuse for slot in slots]
    assert [one.tier for one in found] == ["none", "memory-token", "none"]
    ranks = [score(slot, one, 0.0, 3600.0) for slot, one in zip(slots, found, strict=True)]
    assert ranks[1] == 101
    assert ranks[0] < 0 == ranks[2]


def test_e_the_owner_of_a_stale_checkpoint_scores_its_length():
    slot = Slot(0, checkpoint=checkpoint(ids(160)), last_used=0.0)
    found = look(slot.checkpoint, make_job(1, ids(170)))
    assert score(slot, found.reuse, 7200.0, 3600.0) == 160


# c: the text


def test_c_a_text_prefix_whose_tokens_differ_names_where_the_rest_begins():
    spelt = TEXT.tokenise("<|user|>t") + TEXT.tokenise("he end")
    found = look(checkpoint(spelt, text="<|user|>the end"), make_job(1, "<|user|>the end of it"))
    assert (found.reuse.tier, found.reuse.suffix_from) == ("memory-text", len("<|user|>the end"))
    assert look(checkpoint(spelt), make_job(1, "<|user|>the end of it")) is NOT_FOUND  # no text of exactly these tokens


# f: each live tier


@pytest.mark.parametrize(
    ("api", "tier"), [("responses", "responses-visible"), ("chat", "thinking-visible"), ("anthropic", "thinking-visible")]
)
def test_f_a_conversation_shown_without_its_reasoning_is_continued(api, tier):
    job = make_job(1, SHOWN + "<|user|>and?", api=api)
    reuse, found = look(held(), job, keys(api, visible=SHOWN))
    assert (reuse.tier, reuse.tokens, reuse.suffix_from, reuse.lost) == (tier, len(HELD), len(SHOWN), 0)
    assert found is not None
    assert found.live_state == (tier == "responses-visible")


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_f_the_shown_text_must_be_a_proper_prefix(api):
    for text in (SHOWN, SHOWN[:-1], "x" + SHOWN, SHOWN[:-1] + "x and more"):
        assert look(held(), make_job(1, text, api=api), keys(api, visible=SHOWN)) is NOT_FOUND


@pytest.mark.parametrize(
    ("published", "asking"),
    [("chat", "responses"), ("responses", "chat"), ("chat", "completions"), ("completions", "chat"), ("responses", "anthropic")],
)
def test_f_thinking_is_not_for_responses_nor_for_raw_texts(published, asking):
    job = make_job(1, SHOWN + "<|user|>and?", api=asking)
    assert look(held(), job, keys(published, visible=SHOWN)) is NOT_FOUND


@pytest.mark.parametrize("api", ["responses", "anthropic", "chat"])
def test_f_tool_results_continue_the_session_that_made_the_calls(api):
    reuse, tier = look(held(), results(api), keys(api, calls=CALLS))
    assert (reuse.tier, reuse.tokens) == (f"{api}-tool-output", len(HELD))
    assert reuse.suffix_from == len("<|user|>other words")
    assert tier is not None
    assert tier.live_state == (api != "chat")


@pytest.mark.parametrize("calls", [{"call_a"}, {"call_a", "call_b", "call_c"}, {"call_a", "call_x"}])
@pytest.mark.parametrize("api", ["responses", "anthropic", "chat"])
def test_f_other_calls_than_the_sessions_find_nothing(api, calls):
    assert look(held(), results(api, frozenset(calls)), keys(api, calls=CALLS)) is NOT_FOUND


@pytest.mark.parametrize(("published", "asking"), [("responses", "anthropic"), ("anthropic", "chat"), ("chat", "responses")])
def test_f_calls_belong_to_their_api(published, asking):
    assert look(held(), results(asking), keys(published, calls=CALLS)) is NOT_FOUND


@pytest.mark.parametrize("off", [(0, 1), (1, 0), (-1, 0), (0, -1)])
def test_f_bindings_hold_at_their_frontier_and_generation_alone(off):
    slot = Slot(0, generation=3, checkpoint=held(), bindings=Bindings("chat", Keys(CALLS), len(HELD), 3))
    assert slot.bound is slot.bindings
    slot.bindings = Bindings("chat", Keys(CALLS), len(HELD) + off[0], 3 + off[1])
    assert slot.bound is None


# g, h: order


def test_g_the_shown_text_of_responses_comes_before_tokens():
    job = make_job(1, TEXT.render(HELD) + "<|end|><|user|>and?", api="responses")
    assert look(held(), job).reuse.tier == "memory-token"
    assert look(held(), job, keys("responses", visible=TEXT.render(HELD))).reuse.tier == "responses-visible"


def test_g_tokens_come_before_the_shown_text_of_a_chat():
    job = make_job(1, TEXT.render(HELD) + "<|end|><|user|>and?")
    assert look(held(), job, keys("chat", visible=TEXT.render(HELD))).reuse.tier == "memory-token"


def test_h_an_alien_finds_nothing_behind_populated_bindings():
    slot = Slot(0, checkpoint=held(), last_used=0.0)
    for api in ("responses", "anthropic", "chat"):
        found = look(slot.checkpoint, make_job(1, "something else", api=api), keys(api, calls=CALLS, visible=SHOWN))
        assert found is NOT_FOUND
        assert score(slot, found.reuse, 0.0, 3600.0) == -2 - IDLE_CAP - len(HELD)


# i: images


MARKER = "[image 7f3a]"


def picture(at=2, offset=8, fingerprint="cat", tokens=4) -> Image:
    return Image(fingerprint, tokens, at, offset, len(MARKER))


def test_i_an_image_that_moved_by_a_token_is_another_prompt():
    tokens = ids(40)
    same = make_job(1, [*tokens, 99], images=())
    assert look(checkpoint(tokens), same).reuse.tier == "memory-token"
    text = "<|user|>" + MARKER + "what is it?"
    job = make_job(1, text, images=(picture(),))
    assert look(checkpoint(job.tokens[:-1], images=(picture(),)), job).reuse.tier == "memory-token"
    assert look(checkpoint(job.tokens[:-1], images=(picture(at=3),)), job) is NOT_FOUND


def test_i_other_pixels_are_another_prompt():
    job = make_job(1, "<|user|>" + MARKER + "what is it?", images=(picture(fingerprint="dog"),))
    assert look(checkpoint(job.tokens[:-1], images=(picture(),)), job) is NOT_FOUND
    assert look(checkpoint(job.tokens[:-1]), job).reuse.tier == "memory-token"  # one that comes later is no hindrance
    assert look(checkpoint(job.tokens[:-1], images=(picture(), picture(30))), job) is NOT_FOUND


def test_i_a_marker_is_compared_by_its_place_not_by_its_name():
    def shown(nonce: str, offset: int = 8):
        text = "<|user|>"[:offset].ljust(offset, "x") + nonce + "what?<|end|>"
        return make_job(1, text + "<|user|>and?", images=(picture(offset=offset),))

    first = shown(MARKER)
    visible = first.text[: -len("<|user|>and?")]
    seen = held(images=(picture(at=7),))
    assert look(seen, shown("[image 90c1]"), keys("chat", visible=visible)).reuse.tier == "thinking-visible"
    assert look(seen, shown(MARKER, 9), keys("chat", visible=visible)) is NOT_FOUND
    literal = make_job(1, first.text, images=(picture(offset=len(visible)),))  # characters that look like a masked marker
    assert look(seen, literal, keys("chat", visible=visible)) is NOT_FOUND


# points


def pointed(*points: Point, asked=SHOWN + "<|user|>and?<|end|><|assistant|>", turn_start=0):
    return checkpoint(HELD + ids(30, 900), asked=asked, points=points, turn_start=turn_start, prompt_length=len(HELD))


def only(*lengths: int):
    return lambda length: length in lengths


def test_a_client_that_comes_back_to_a_point_keeps_what_stands_before_it():
    point = Point(len(HELD) - 3, len(SHOWN))
    for again in ("<|user|>and?<|end|><|assistant|>", "<|user|>or?<|end|><|assistant|>"):
        reuse, _ = look(pointed(point), make_job(1, SHOWN + again))
        assert (reuse.tier, reuse.tokens, reuse.suffix_from, reuse.lost) == ("rewind-point", point.tokens, len(SHOWN), 33)


def test_a_point_needs_more_text_than_it_stands_for_and_a_state_to_go_back_to():
    point = Point(len(HELD) - 3, len(SHOWN))
    assert look(pointed(point), make_job(1, SHOWN)) is NOT_FOUND
    assert look(pointed(point), make_job(1, SHOWN + "more"), None, only(0, 5)) is NOT_FOUND
    assert look(pointed(Point(point.tokens, None)), make_job(1, SHOWN + "more")) is NOT_FOUND


def test_the_last_point_that_fits_is_taken():
    early, late = Point(10, 8), Point(len(HELD) - 3, len(SHOWN))
    assert look(pointed(early, late), make_job(1, SHOWN + "more")).reuse.tokens == late.tokens
    assert look(pointed(early, late), make_job(1, SHOWN[:20])).reuse.tokens == early.tokens


def test_a_state_that_cannot_be_cut_goes_back_by_tokens_to_its_only_point():
    reuse, _ = look(pointed(Point(12, None)), make_job(1, [*HELD[:14], 7, 7]), None, only(0, 12))
    assert (reuse.tier, reuse.tokens, reuse.suffix_from) == ("rewind-point", 12, None)
    assert look(pointed(Point(12, None)), make_job(1, HELD[:12]), None, only(0, 12)) is NOT_FOUND  # nothing to evaluate


def test_an_earlier_turn_may_be_anothers_conversation():
    early, late = Point(12, 30), Point(len(HELD), len(SHOWN) + 9)
    assert look(pointed(early, late), make_job(1, SHOWN[:30] + "x" * 60)).reuse.foreign
    assert not look(pointed(early, late, turn_start=12), make_job(1, SHOWN[:30] + "x" * 60)).reuse.foreign
    assert look(pointed(early, late, turn_start=12), make_job(1, SHOWN[:30] + "x")).reuse.foreign  # destroys more than it needs


def test_a_session_keeps_its_last_few_points_in_order():
    points = [Point(n, n) for n in (9, 3, 7, 5, 1)]
    assert [p.tokens for p in latest(points)] == [3, 5, 7, 9]
    assert latest([Point(4, None), Point(4, 11)]) == (Point(4, 11),)


def test_a_job_whose_places_lie_outside_its_text_is_refused():
    with pytest.raises(ValueError, match="continues: it names no call"):
        make_job(1, "text", continues=Continuation(frozenset(), 1))
    with pytest.raises(ValueError, match=r"continues: .* text is empty"):
        make_job(1, "text", continues=Continuation(CALLS, 4))
    with pytest.raises(ValueError, match="generation_from: 4 is not inside a text of 4"):
        make_job(1, "text", generation_from=4)
    with pytest.raises(ValueError, match="images: the one at 8"):
        make_job(1, "text", images=(picture(),))
