"""Text of a turn: characters are never cut, stop strings never shown, and nothing is lost or said twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds4batch.engine.output import TextOutput
from scheduler.backend import Sampled, Verdict

SPECIAL = 999


class Turn:
    """Feeds byte pieces as tokens and keeps what is shown."""

    def __init__(self, pieces: list[bytes], stop: tuple[str, ...] = ()) -> None:
        self.pieces = pieces
        self.shown: list[str] = []
        self.tokens = 0
        self.output = TextOutput(lambda i: self.pieces[i], {SPECIAL}, stop, self.take)
        self.verdict: Verdict | None = None

    def take(self, text: str, tokens: int, logprobs: list[object]) -> None:
        self.shown.append(text)
        self.tokens += tokens

    def run(self) -> str:
        for i in range(len(self.pieces)):
            self.verdict = self.output.push(Sampled(i, None, ()))
            if self.verdict:
                break
        self.output.finish()
        return "".join(self.shown)


@given(st.text(max_size=40), st.data())
def test_any_cut_of_the_bytes_gives_the_text_and_no_half_characters(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    turn = Turn(pieces)
    assert turn.run() == text
    assert all("\ufffd" not in shown or "\ufffd" in text for shown in turn.shown)
    assert turn.tokens == len(pieces)


@given(st.lists(st.sampled_from("abEND é"), max_size=30), st.data())
def test_text_ends_before_the_first_stop_string_wherever_it_is_cut(letters: list[str], data: st.DataObject) -> None:
    text = "".join(letters)
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    turn = Turn(pieces, ("END", "bb"))
    ends = [at for at in (text.find("END"), text.find("bb")) if at >= 0]
    assert turn.run() == (text[: min(ends)] if ends else text)


def test_a_verdict_keeps_the_tokens_that_the_visible_text_covers() -> None:
    turn = Turn([b"one ", b"two", b" ST", b"OP and more"], ("STOP",))
    assert turn.run() == "one two "
    assert turn.verdict == Verdict("stop", 2)


def test_a_stop_string_that_begins_inside_a_token_cuts_the_text_inside_it() -> None:
    turn = Turn([b"abc", b"deST", b"OP"], ("STOP",))
    assert turn.run() == "abcde"
    assert turn.verdict == Verdict("stop", 1)


def test_nothing_is_shown_behind_a_stop_string() -> None:
    assert Turn([b"a", "STOPé".encode()[:-1]], ("STOP",)).run() == "a"


def test_what_may_still_become_a_stop_string_is_held_and_then_shown() -> None:
    turn = Turn([b"x ST", b"ART"], ("STOP",))
    turn.output.push(Sampled(0, None, ()))
    assert "".join(turn.shown) == "x"
    turn = Turn([b"x ST", b"ART"], ("STOP",))
    assert turn.run() == "x START"
    assert turn.verdict is None


def test_special_tokens_have_no_text_but_count() -> None:
    turn = Turn([b"a"])
    turn.output.push(Sampled(SPECIAL, None, ()))
    turn.output.push(Sampled(0, None, ()))
    turn.output.finish()
    assert ("".join(turn.shown), turn.tokens) == ("a", 2)


def test_a_cut_character_at_the_end_becomes_a_replacement() -> None:
    assert Turn(["é".encode()[:1]]).run() == "\ufffd"


def test_logprobs_arrive_with_their_tokens() -> None:
    got = []
    output = TextOutput(lambda i: b"x", set(), ("STOP",), lambda text, tokens, logprobs: got.append((tokens, len(logprobs))))
    output.push(Sampled(1, -0.5, ((1, -0.5),)))
    output.push(Sampled(2, -0.25, ()))
    output.finish()
    assert sum(t for t, _ in got) == sum(n for _, n in got) == 2
