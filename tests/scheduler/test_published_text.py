"""The text of a checkpoint is the text of exactly its tokens, or there is none."""

from scheduler_rig import make_job

from scheduler.publish import checkpoint_text, publish
from scheduler.slots import NOTHING, Checkpoint


class Bytes:
    """One token a byte, as a byte-level tokeniser renders an emoji; counts what it renders."""

    def __init__(self) -> None:
        self.rendered = 0

    def tokenise(self, text: str) -> list[int]:
        return list(text.encode())

    def render(self, tokens) -> str:
        self.rendered += len(tokens)
        return bytes(tokens).decode(errors="replace")


class Stripping(Bytes):
    """Drops a space at the very beginning, as sentence-piece decoders do."""

    def render(self, tokens) -> str:
        return super().render(tokens).removeprefix(" ")


def test_only_what_follows_is_rendered():
    text = Bytes()
    tokens = text.tokenise("a" * 5000 + "bcd")
    assert checkpoint_text(text, tokens, "a" * 5000, 5000) == "a" * 5000 + "bcd"
    assert text.rendered < 50


def test_a_known_text_that_covers_all_is_taken_as_it_is():
    text = Bytes()
    assert checkpoint_text(text, text.tokenise("abc"), "abc", 3) == "abc"
    assert text.rendered == 0


def test_a_decoder_that_strips_a_leading_space_loses_none_in_the_middle():
    text = Stripping()
    tokens = text.tokenise("hello there")
    assert checkpoint_text(text, tokens, "hello", 5) == "hello there"


def test_a_character_completed_by_the_new_tokens_is_whole():
    text = Bytes()
    tokens = text.tokenise("hi \U0001f600!")
    assert checkpoint_text(text, tokens, "hi \ufffd", 5) == "hi \U0001f600!"


def test_a_character_that_stays_incomplete_has_no_text():
    text = Bytes()
    tokens = text.tokenise("hi \U0001f600")[:-1]
    assert checkpoint_text(text, tokens, "hi ", 3) is None
    assert checkpoint_text(text, tokens, "", 0) is None


def run_job(prompt: str, done: int, cached: int = 0):
    job = make_job(1, prompt)
    job.prompt, job.done, job.cached = list(prompt.encode()), done, cached
    return job


def test_a_prompt_evaluated_to_its_end_stands_for_the_jobs_own_text():
    text = Bytes()
    job = run_job("hello", 5)
    held = publish(text, job, text.tokenise("hello there"), NOTHING)
    assert (held.text, held.length, held.prompt_length) == ("hello there", 11, 5)


def test_a_prompt_of_ids_has_the_text_they_render_to():
    text = Bytes()
    job = run_job("hello", 5)
    job.text = ""
    assert publish(text, job, text.tokenise("hello there"), NOTHING).text == "hello there"


def test_a_prompt_cut_short_knows_its_text_as_far_as_the_slot_did():
    text = Bytes()
    earlier = Checkpoint(length=5, packed=b"", text="hello")
    held = publish(text, run_job("hello there", 8, cached=5), text.tokenise("hello th"), earlier)
    assert (held.text, held.prompt_length) == ("hello th", 0)
    assert publish(text, run_job("hello there", 8), text.tokenise("hello th"), NOTHING).text is None
    cut = publish(text, run_job("hello there", 8, cached=3), text.tokenise("hello th"), earlier)
    assert cut.text is None


def test_an_empty_session_publishes_nothing():
    assert publish(Bytes(), run_job("hello", 0), [], NOTHING) is NOTHING
