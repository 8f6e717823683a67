"""What a probe finds in a checkpoint: the tiers in their order, and the guards of a cut."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_rig import TEXT, checkpoint, make_job, options

from scheduler.job import pack
from scheduler.reuse import NOT_FOUND, Found, common_prefix, probe, turn_start_after

OPTIONS = options()


def look(held, job, can_truncate=lambda length: True) -> Found:
    return probe(held, job, can_truncate, OPTIONS)


def ids(count: int, first: int = 0) -> list[int]:
    """Distinct token ids."""
    return list(range(first, first + count))


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)), st.lists(st.integers(0, 2**32 - 1), max_size=4000))
def test_common_prefix_is_what_a_loop_over_the_tokens_finds(a, b, shared):
    a, b = shared + a, shared + b
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(pack(a), pack(b)) == expected


@pytest.mark.parametrize("at", [0, 1, 1023, 1024, 1025, 2047, 2048, 4999])
def test_common_prefix_finds_a_single_changed_token_at_any_place(at):
    a = ids(5000)
    b = a.copy()
    b[at] += 1
    assert common_prefix(pack(a), pack(b)) == at


def test_an_empty_checkpoint_offers_nothing():
    assert look(checkpoint([]), make_job(1, ids(50))) == NOT_FOUND


def test_an_alien_prompt_that_shares_100_tokens_reuses_nothing():
    job = make_job(1, ids(100) + ids(80, 5000))
    assert look(checkpoint(ids(160)), job) == NOT_FOUND
    assert look(checkpoint(ids(101)), job) == NOT_FOUND


def test_a_prompt_that_extends_the_checkpoint_keeps_all_of_it():
    reuse, tier = look(checkpoint(ids(101)), make_job(1, ids(150)))
    assert (reuse.tier, reuse.tokens, reuse.suffix_from, reuse.lost, reuse.foreign) == ("memory-token", 101, None, 0, False)
    assert tier is not None
    assert tier.name == "memory-token"


def test_a_prompt_equal_to_the_checkpoint_evaluates_its_last_token_again():
    reuse, _ = look(checkpoint(ids(101)), make_job(1, ids(101)))
    assert (reuse.tier, reuse.tokens) == ("memory-token", 100)


def test_a_prompt_equal_to_the_checkpoint_is_a_miss_where_nothing_can_be_cut():
    assert look(checkpoint(ids(101)), make_job(1, ids(101)), lambda length: False) == NOT_FOUND


def test_a_checkpoint_of_one_token_equal_to_the_prompt_saves_nothing():
    assert look(checkpoint([7]), make_job(1, [7])) == NOT_FOUND


def test_text_continues_where_tokens_part_ways():
    held = TEXT.tokenise("<|user|>t") + TEXT.tokenise("he end")  # the tokeniser would merge "th"
    job = make_job(1, "<|user|>the end of it")
    assert job.tokens[: len(held)] != held
    reuse, _ = look(checkpoint(held, text="<|user|>the end"), job)
    assert (reuse.tier, reuse.tokens, reuse.suffix_from) == ("memory-text", len(held), len("<|user|>the end"))


def test_a_checkpoint_without_a_text_of_its_own_never_matches_by_text():
    held = TEXT.tokenise("<|user|>t") + TEXT.tokenise("he end")
    assert look(checkpoint(held, text=None), make_job(1, "<|user|>the end of it")) == NOT_FOUND


def test_an_empty_text_never_matches():
    assert look(checkpoint(ids(20, 900), text=""), make_job(1, "anything")) == NOT_FOUND


def test_a_text_equal_to_the_prompts_evaluates_its_last_token_again():
    held = TEXT.tokenise("t") + TEXT.tokenise("he end")
    reuse, _ = look(checkpoint(held, text="the end"), make_job(1, "the end"))
    assert (reuse.tier, reuse.tokens) == ("memory-text", len(held) - 1)


def test_a_text_longer_than_the_prompts_is_no_match():
    held = TEXT.tokenise("t") + TEXT.tokenise("he end")
    assert look(checkpoint(held, text="the end"), make_job(1, "the en")) == NOT_FOUND


def test_tokens_win_over_text():
    reuse, _ = look(checkpoint(TEXT.tokenise("the end"), text="the end"), make_job(1, "the end of it"))
    assert reuse.tier == "memory-token"


def test_keeping_the_whole_checkpoint_by_text_wins_over_cutting_it():
    head = "the " * 400
    held = TEXT.tokenise(head) + TEXT.tokenise("t") + TEXT.tokenise("he answer")
    job = make_job(1, head + "the answer and more")
    reuse, _ = look(checkpoint(held, text=head + "the answer", prompt_length=len(TEXT.tokenise(head))), job)
    assert (reuse.tier, reuse.lost) == ("memory-text", 0)


# cutting: the whole prompt lies inside


def test_a_retry_of_the_same_prompt_drops_the_answer():
    reuse, _ = look(checkpoint(ids(60), prompt_length=40), make_job(1, ids(40)))
    assert (reuse.tier, reuse.tokens, reuse.lost, reuse.foreign) == ("memory-rewind", 39, 21, False)


def test_a_shorter_prompt_qualifies_however_short():
    reuse, _ = look(checkpoint(ids(1000), turn_start=900, prompt_length=950), make_job(1, ids(2)))
    assert (reuse.tier, reuse.tokens) == ("memory-rewind", 1)


def test_a_prompt_of_one_token_saves_nothing():
    assert look(checkpoint(ids(60)), make_job(1, ids(1))) == NOT_FOUND


def test_no_cut_is_promised_that_the_backend_would_refuse():
    asked = []

    def refuse(length: int) -> bool:
        asked.append(length)
        return False

    assert look(checkpoint(ids(60)), make_job(1, ids(40)), refuse) == NOT_FOUND
    assert look(checkpoint(ids(1000), prompt_length=990), make_job(1, [*ids(980), 5]), refuse) == NOT_FOUND
    assert asked == [39, 980]


# cutting: prompt and checkpoint part ways


def conversation(turn_start=900, prompt_length=1000, live=1100):
    """A checkpoint whose last turn began at 900 and was answered from 1000 on."""
    return checkpoint(ids(live), turn_start=turn_start, prompt_length=prompt_length)


def test_an_edited_last_message_keeps_the_turns_before_it():
    reuse, _ = look(conversation(), make_job(1, ids(920) + ids(50, 7000)))
    assert (reuse.tier, reuse.tokens, reuse.lost, reuse.foreign) == ("memory-rewind", 920, 180, False)


def test_an_answer_sent_back_without_its_reasoning_keeps_its_prompt():
    held = checkpoint(ids(1300), turn_start=0, prompt_length=1000)
    reuse, _ = look(held, make_job(1, ids(998) + ids(120, 7000)))  # the opening of the answer is not repeated
    assert (reuse.tokens, reuse.foreign) == (998, False)


def test_whoever_shares_only_the_system_prompt_is_foreign():
    reuse, _ = look(conversation(), make_job(1, ids(500) + ids(100, 7000)))
    assert (reuse.tier, reuse.tokens, reuse.lost, reuse.foreign) == ("memory-rewind", 500, 600, True)


def test_after_a_first_turn_only_the_whole_prompt_proves_who_asks():
    held = checkpoint(ids(1100), turn_start=0, prompt_length=1000)
    assert look(held, make_job(1, ids(995) + ids(50, 7000))).reuse.foreign
    assert not look(held, make_job(1, ids(996) + ids(50, 7000))).reuse.foreign


def test_after_a_prompt_that_was_cut_short_nobody_is_the_owner():
    held = checkpoint(ids(600), turn_start=0, prompt_length=0)
    assert look(held, make_job(1, ids(590) + ids(50, 7000))).reuse.foreign


def test_a_cut_that_destroys_what_an_empty_slot_would_cost_is_foreign():
    prompt = ids(920) + ids(80, 7000)
    assert not look(conversation(live=1919), make_job(1, prompt)).reuse.foreign
    assert look(conversation(live=1920), make_job(1, prompt)).reuse.foreign


@pytest.mark.parametrize(("common", "found"), [(255, False), (256, True)])
def test_a_short_common_prefix_is_not_worth_a_cut(common, found):
    held = checkpoint(ids(300), turn_start=10, prompt_length=290)
    assert (look(held, make_job(1, ids(common) + ids(10, 7000))) is not NOT_FOUND) == found


@pytest.mark.parametrize(("length", "found"), [(800, True), (801, False)])
def test_a_small_part_of_the_prompt_is_not_worth_a_cut(length, found):
    held = checkpoint(ids(450), turn_start=10, prompt_length=440)
    assert (look(held, make_job(1, ids(400) + ids(length - 400, 7000))) is not NOT_FOUND) == found


# where the next turn begins


def test_an_answered_turn_that_stays_whole_is_an_earlier_turn():
    held = conversation()
    assert turn_start_after(held, look(held, make_job(1, ids(1200))).reuse) == 1100


def test_a_cut_within_the_last_turn_keeps_its_beginning():
    held = conversation()
    assert turn_start_after(held, look(held, make_job(1, ids(920) + ids(50, 7000))).reuse) == 900


def test_a_cut_before_the_last_turn_forgets_it():
    held = conversation()
    assert turn_start_after(held, look(held, make_job(1, ids(500) + ids(100, 7000))).reuse) == 0


def test_a_prompt_that_was_cut_short_is_no_turn():
    held = checkpoint(ids(600), turn_start=0, prompt_length=0)
    assert turn_start_after(held, look(held, make_job(1, ids(700))).reuse) == 0


def test_nothing_reused_begins_at_nothing():
    assert turn_start_after(conversation(), NOT_FOUND.reuse) == 0


def test_a_probe_changes_nothing_and_answers_the_same_again():
    held, job = conversation(), make_job(1, ids(920) + ids(50, 7000))
    before = (held, list(job.tokens), job.state)
    assert look(held, job) == look(held, job)
    assert before == (held, list(job.tokens), job.state)


@given(st.randoms(use_true_random=False))
def test_a_tier_never_promises_more_than_is_shared_and_leaves_a_token_to_evaluate(rng: random.Random):
    held = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
    prompt = (held[: rng.randrange(len(held) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(6))]) or [1]
    reuse, _ = look(checkpoint(held), make_job(1, prompt))
    assert reuse.tokens <= common_prefix(pack(held), pack(prompt))
    assert reuse.tokens < len(prompt)
