"""What is noted of a prompt: the text its ids stand for, and the places in it that a client may come back to."""

from __future__ import annotations

from scheduler_rig import TEXT, checkpoint, make_job

from scheduler.bindings import Image, Point
from scheduler.points import settle
from scheduler.publish import publish
from scheduler.reuse import NOT_FOUND, Reuse
from scheduler.slots import NOTHING

OPEN = "<|assistant|>"
ASKED = "<|user|>why?<|end|>" + OPEN
HELD = TEXT.tokenise(ASKED + "hm. because")


def settled(text: str, reuse: Reuse = NOT_FOUND.reuse, held=NOTHING, *, prompt=None, marks=False, opening=True, **rest):
    job = make_job(1, text, generation_from=len(text) - len(OPEN) if opening else None, **rest)
    job.prompt = job.tokens if prompt is None else prompt
    settle(job, held, reuse, TEXT, marks)
    return job


def kept(tokens: int, suffix_from: int | None, lost: int = 0) -> Reuse:
    return Reuse("any", tokens, suffix_from, lost, foreign=False)


def test_a_cold_prompt_ends_where_its_last_message_does():
    job = settled(ASKED)
    assert (job.prompt_text, job.points, job.mark_at) == (ASKED, (Point(len(job.tokens) - 1, len(ASKED) - len(OPEN)),), 0)
    assert settled(ASKED, marks=True).mark_at == len(job.tokens) - 1


def test_without_the_opening_the_last_token_stands_apart_where_that_matters():
    assert settled("the end of it", opening=False).points == ()
    job = settled("the end of it", opening=False, marks=True)
    assert job.points == (Point(len(job.tokens) - 1, len("the end of i")),)
    assert settled("t", opening=False, marks=True).points == ()


def test_an_opening_that_was_cut_into_other_tokens_is_not_a_place():
    job = settled(ASKED + "thin", marks=True, prompt=[*TEXT.tokenise(ASKED), *TEXT.tokenise("t"), *TEXT.tokenise("hin")])
    assert job.points[-1].tokens == len(job.prompt) - 1


def test_a_session_that_is_kept_whole_lends_its_own_text():
    shown = ASKED + "because"
    text = shown + "<|end|>" + ASKED
    suffix = text[len(shown) :]
    held = checkpoint(HELD, text=ASKED + "hm. because", asked=ASKED, points=(Point(7, len(ASKED) - len(OPEN)),))
    prompt = HELD + TEXT.tokenise(suffix)
    job = settled(text, kept(len(HELD), len(shown)), held, prompt=prompt)
    assert job.prompt_text == TEXT.render(prompt) == ASKED + "hm. because" + suffix
    assert job.points == (
        Point(7, len(ASKED) - len(OPEN)), Point(len(HELD), len(shown)), Point(len(prompt) - 1, len(text) - len(OPEN)),
    )  # fmt: skip


def test_of_a_session_that_was_cut_nobody_knows_the_text():
    held = checkpoint(HELD, text=ASKED + "hm. because", asked=ASKED)
    prompt = HELD[:-3] + TEXT.tokenise("x" + OPEN)
    job = settled("shown" + "x" + OPEN, kept(len(HELD) - 3, 5, lost=3), held, prompt=prompt)
    assert job.prompt_text == ""
    assert publish(TEXT, job, prompt, held).text == TEXT.render(prompt)


def test_points_of_a_history_that_reads_otherwise_are_forgotten():
    held = checkpoint(HELD, text=ASKED + "hm. because", asked=ASKED, points=(Point(7, 12),))
    edited = ASKED.replace("why", "how") + "call<|end|>" + ASKED
    job = settled(edited, kept(len(HELD), len(ASKED) + 4), held, prompt=HELD + TEXT.tokenise("<|end|>" + ASKED))
    assert [point.tokens for point in job.points] == [len(HELD), len(job.prompt) - 1]


def test_points_behind_a_cut_are_forgotten():
    held = checkpoint(HELD, asked=ASKED, points=(Point(5, 11), Point(9, 13)))
    job = settled(ASKED[:11] + "x" + OPEN, kept(5, 11, lost=len(HELD) - 5), held, prompt=HELD[:5] + TEXT.tokenise("x" + OPEN))
    assert job.points == (Point(5, 11), Point(6, 12))


def test_what_was_not_reached_is_not_published():
    job = settled(ASKED, marks=True)
    assert publish(TEXT, job, job.tokens[:-2], NOTHING).points == ()
    assert publish(TEXT, job, job.tokens[:-1], NOTHING).points == job.points
    assert publish(TEXT, job, job.tokens, NOTHING).asked == ASKED


def test_an_image_stays_where_the_session_has_it():
    old = Image("cat", 2, 3, 8, 4)
    text = "<|user|>????what<|end|>" + OPEN
    held = checkpoint(HELD, text="anything", asked=text, images=(old,))
    job = settled(text, kept(len(HELD), 12), held, prompt=[*HELD, 1, 2], images=(old._replace(at=1),))
    assert [image.at for image in job.images] == [3]
    assert publish(TEXT, job, job.prompt, held).images == (old,)
    assert publish(TEXT, job, job.prompt[:4], held).images == ()


def test_a_tokeniser_that_fails_costs_the_points_alone():
    class Broken:
        def tokenise(self, text):
            raise RuntimeError("no")

        render = tokenise

    job = make_job(1, ASKED, generation_from=8)
    job.prompt = job.tokens
    settle(job, NOTHING, NOT_FOUND.reuse, Broken(), True)
    assert (job.points, job.mark_at, job.prompt_text) == ((), 0, ASKED)
