"""Text of a turn: characters are never cut, stop strings never shown, and nothing is lost or said twice."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.events import Turn as Events
from ds4batch.chat.tracker import Tracker
from ds4batch.engine.output import Piece, TextOutput
from ds4batch.engine.sampler import Draw
from ds4batch.messages import Sampling
from scheduler.backend import Answered, Sampled, Verdict

SPECIAL = 999


class Turn:
    """Feeds byte pieces as tokens and keeps what is shown."""

    def __init__(
        self,
        pieces: list[bytes],
        stop: tuple[str, ...] = (),
        tracker: Callable[[], Tracker] | None = None,
        draw: Draw | None = None,
    ) -> None:
        self.pieces = pieces
        self.shown: list[str] = []
        self.turn = Events()
        self.tokens = 0
        self.reason = ""
        self.output = TextOutput(lambda i: self.pieces[i], {SPECIAL}, stop, self.take, tracker, draw)
        self.verdict: Verdict | None = None

    def take(self, piece: Piece) -> None:
        self.shown.append(piece.text)
        self.turn.add(piece.events)
        self.tokens += piece.tokens

    def run(self, reason: Answered = "stop") -> str:
        for i in range(len(self.pieces)):
            self.verdict = self.output.push(Sampled(i, None, ()))
            if self.verdict:
                break
        self.reason = self.output.finish(self.verdict.reason if self.verdict else reason)
        if self.output.end is not None:
            self.turn.add(self.output.end.events)
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
    turn.output.finish("stop")
    assert ("".join(turn.shown), turn.tokens) == ("a", 2)


def test_a_cut_character_at_the_end_becomes_a_replacement() -> None:
    assert Turn(["é".encode()[:1]]).run() == "\ufffd"


def test_logprobs_arrive_with_their_tokens() -> None:
    got = []
    output = TextOutput(lambda i: b"x", set(), ("STOP",), lambda piece: got.append((piece.tokens, len(piece.logprobs))))
    output.push(Sampled(1, -0.5, ((1, -0.5),)))
    output.push(Sampled(2, -0.25, ()))
    output.finish("length")
    assert sum(t for t, _ in got) == sum(n for _, n in got) == 2


# With a tracker: what the text is.

CALL = "<tool_call>\n<function=ls>\n<parameter=path>\n/tmp\n</parameter>\n</function>\n</tool_call>"


def reading(thinking: bool = False) -> Callable[[], Tracker]:
    return lambda: Tracker("qwen", thinking=thinking, tools={"ls": frozenset({"path"})}, new_id=lambda: "call_1")


def letters(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


@given(st.integers(1, 9), st.booleans())
def test_the_parts_of_a_turn_are_those_of_its_text_wherever_it_is_cut(size: int, stopping: bool) -> None:
    raw = f"hm \u00e9</think>\n\nI look.\n\n{CALL}".encode()
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    turn = Turn(pieces, ("NEVER",) if stopping else (), reading(thinking=True))
    assert turn.run() == raw.decode()
    assert (turn.turn.reasoning, turn.turn.content, turn.reason) == (["hm \u00e9"], "I look.", "tool_calls")
    assert [(call.name, call.arguments) for call in turn.turn.complete_calls] == [("ls", '{"path":"/tmp"}')]
    assert turn.output.end is not None
    assert turn.output.end.raw == "\n\n" + CALL


def test_the_turn_ends_with_its_calls_where_another_block_cannot_follow() -> None:
    tag = "\uff5cDSML\uff5c"
    dsml = f'\n\n<{tag}tool_calls>\n<{tag}invoke name="ls">\n</{tag}invoke>\n</{tag}tool_calls>'
    turn = Turn(letters(dsml + " and more"), (), lambda: Tracker("dsml", thinking=False, tools={}, new_id=lambda: "call_1"))
    assert turn.run() == dsml
    assert turn.verdict == Verdict("tool_calls", len(dsml.encode()))
    assert turn.reason == "tool_calls"


def test_structure_is_greedy_and_payload_is_not_even_while_text_is_held_for_a_stop_string() -> None:
    draw = Draw(Sampling(temperature=0.7), [], ())
    for stop in ((), ("a stop string that is longer than everything here" * 4,)):
        turn = Turn(letters(CALL), stop, reading(), draw)
        greedy = []
        for i in range(len(CALL)):
            greedy.append(draw.temperature == 0.0)
            turn.output.push(Sampled(i, None, ()))
        drawn_freely = "".join(letter for letter, structure in zip(CALL, greedy, strict=True) if not structure)
        assert drawn_freely == "<tool_call>\n/tmp\n</"


def test_a_stop_string_inside_a_call_leaves_no_call() -> None:
    turn = Turn(letters("I look.\n\n" + CALL), ("/tmp",), reading())
    turn.run()
    assert turn.output.cut
    assert (turn.reason, turn.turn.complete_calls) == ("stop", [])


def test_a_call_that_a_limit_cuts_is_text_and_the_limit_is_told() -> None:
    turn = Turn(letters("I look.\n\n" + CALL[:40]), (), reading())
    turn.run("length")
    assert (turn.reason, turn.turn.complete_calls) == ("length", [])
    assert turn.turn.content == "I look.\n\n" + CALL[:40]
    assert turn.output.end is not None
    assert (turn.output.end.raw, turn.output.end.malformed) == (None, "")
