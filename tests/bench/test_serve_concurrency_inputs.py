"""Flags and prompts of the load benchmark."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from bench import corpus
from bench.http_stream import ChatClient, ServerUnusable
from bench.load import choose_hangups
from bench.prompts import PromptBook
from bench.serve_options import Cell, DisconnectAfter, When, parse_options
from tests.bench.chat_server import CHARACTERS_PER_TOKEN, ChatServer, serving


@pytest.mark.parametrize(
    ("argv", "flag", "message"),
    [
        (["--requests", "0"], "--requests", "below 1"),
        (["--requests", "2.5"], "--requests", "whole number"),
        (["--concurrency", "-1"], "--concurrency", "below 1"),
        (["--request-rate", "nan"], "--request-rate", "not finite"),
        (["--request-rate", "-1"], "--request-rate", "below 0"),
        (["--burstiness", "0"], "--burstiness", "not above 0"),
        (["--max-concurrency", "x"], "--max-concurrency", "whole number"),
        (["--sessions", "0"], "--sessions", "below 1"),
        (["--turns", "0"], "--turns", "below 1"),
        (["--turn-tokens", "0"], "--turn-tokens", "below 1"),
        (["--think-time", "inf"], "--think-time", "not finite"),
        (["--sweep", "1,,2"], "--sweep", "whole number"),
        (["--sweep", "1:0"], "--sweep", "below 1"),
        (["--prompt-tokens", "-1"], "--prompt-tokens", "below 0"),
        (["--seed", "-1"], "--seed", "below 0"),
        (["--max-tokens", "0"], "--max-tokens", "below 1"),
        (["--temperature", "-0.5"], "--temperature", "below 0"),
        (["--warmup", "-1"], "--warmup", "below 0"),
        (["--timeout", "0"], "--timeout", "not above 0"),
        (["--disconnect-fraction", "1.5"], "--disconnect-fraction", "above 1"),
        (["--disconnect-after", "never"], "--disconnect-after", "whole number"),
        (["--disconnect-after", "0"], "--disconnect-after", "below 1"),
        (["--intruder-tokens", "-3"], "--intruder-tokens", "below 0"),
        (["--intruder-at", "120%"], "--intruder-at", "above 1"),
        (["--intruder-at", "soon"], "--intruder-at", "not a number"),
        (["--goodput", "itl:5"], "--goodput", "ttft:MS"),
        (["--goodput", "ttft:-5"], "--goodput", "not above 0"),
        (["--goodput", "ttft:5", "ttft:6"], "--goodput", "twice"),
        (["--base-url", "localhost:8000"], "--base-url", "http://"),
        (["--metrics-url", "metrics"], "--metrics-url", "http://"),
        (["--mode", "poisson"], "--request-rate", "above 0"),
        (["--mode", "closed", "--request-rate", "2"], "--request-rate", "does not go with"),
        (["--max-concurrency", "4"], "--max-concurrency", "--concurrency"),
        (["--sweep", "1,2", "--mode", "sessions"], "--sweep", "does not go with"),
        (["--disconnect-fraction", "0.5", "--mode", "sessions"], "--disconnect-fraction", "does not go with"),
        (["--json", "/nowhere/at/all.json"], "--json", "cannot be written"),
        (["--json", "/"], "--json", "cannot be written"),
        (["--plot", "/dev/null/plots"], "--plot", "/dev/null"),
        (["--prompt-file", "/nowhere.txt"], "--prompt-file", "no file"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_flag(
    argv: list[str], flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err.rsplit("error:", 1)[1]
    assert flag in error
    assert message in error


def test_the_mode_follows_from_the_rate() -> None:
    assert parse_options([]).mode == "closed"
    assert parse_options(["--request-rate", "2"]).mode == "poisson"
    assert parse_options(["--mode", "sessions", "--sessions", "3", "--turns", "5"]).total_requests == 15


def test_composite_flags_are_understood() -> None:
    options = parse_options(
        ["--sweep", "1:4,16", "--goodput", "ttft:200", "tpot:20.5", "--intruder-at", "12.5%", "--disconnect-after", "7"]
    )
    assert options.sweep == (Cell(1, 4), Cell(16, None))
    assert options.goodput == {"ttft": 200.0, "tpot": 20.5}
    assert options.intruder_at == When(None, 0.125)
    assert options.disconnect_after == DisconnectAfter("tokens", 7)
    assert parse_options(["--intruder-at", "3"]).intruder_at == When(3.0, None)


def test_a_missing_matplotlib_is_reported_before_the_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse_options(["--plot", str(tmp_path)])
    assert "--plot needs matplotlib" in capsys.readouterr().err


def book(run: str = "r", seed: int = 0, shared_prefix: bool = False, tokens: int = 100) -> PromptBook:
    return PromptBook(corpus.prose(20_000), seed, run, tokens, shared_prefix)


def text(prompts: PromptBook, index: int) -> str:
    (message,) = prompts.single(index)
    assert message["role"] == "user"
    return message["content"]


def without_nonce(prompts: PromptBook, index: int) -> str:
    return text(prompts, index).replace(prompts.nonce(index), "")


def test_prompts_start_apart_so_that_no_prefix_is_shared() -> None:
    prompts = book()
    heads = {text(prompts, index)[:14] for index in range(50)}
    assert len(heads) == 50
    assert all(len(prompts.nonce(index)) == 12 for index in range(50))  # 48 bits


def test_a_shared_prefix_is_all_but_the_nonce() -> None:
    prompts = book(shared_prefix=True)
    first, second = text(prompts, 0), text(prompts, 1)
    assert first != second
    shared = first[: first.rindex("[")]
    assert second.startswith(shared)
    assert len(shared) > 400


def test_another_run_asks_about_the_same_text_under_other_nonces() -> None:
    one, other = book(run="a"), book(run="b")
    assert all(without_nonce(one, k) == without_nonce(other, k) for k in range(5))
    assert all(one.nonce(k) != other.nonce(k) for k in range(5))
    assert text(book(run="a"), 3) == text(one, 3)
    assert one.for_load(0) == one
    assert one.for_load(1).nonce(0) != one.nonce(0)


def test_the_seed_moves_the_slices() -> None:
    assert without_nonce(book(seed=1), 0) != without_nonce(book(seed=2), 0)


def test_prompts_longer_than_the_corpus_go_round() -> None:
    prompts = PromptBook("abc ", 0, "r", 100)
    assert len(prompts.slice(1001, 0)) == 1001
    assert "abc abc " in prompts.slice(1001, 0)


def test_no_prompt_tokens_is_one_line() -> None:
    assert "\n" not in text(book(tokens=0), 0)
    assert "\n" not in text(book(tokens=0, shared_prefix=True), 0)


def test_the_corpora_are_the_same_every_time_and_plain_text() -> None:
    assert corpus.prose(5000) == corpus.prose(5000)
    assert len(corpus.prose(5000)) >= 5000
    assert "class PromptBook" in corpus.code()


def test_a_bad_prompt_file_is_named(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("  \n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (empty, binary, tmp_path / "missing.txt"):
        with pytest.raises(ValueError, match=path.name):
            corpus.from_file(path)


def calibrated(server: ChatServer, prompts: PromptBook) -> PromptBook:
    async def calibrate() -> PromptBook:
        async with ChatClient(
            server.url + "/v1", model="tiny", temperature=0.0, ignore_eos=False, no_think=False, timeout=10.0
        ) as client:
            return await prompts.calibrated(client, prompts.prompt_tokens)

    return asyncio.run(calibrate())


@pytest.mark.parametrize("template", [0, 40])
@pytest.mark.parametrize("shared_prefix", [False, True])
def test_calibration_makes_prompts_as_long_as_asked_whatever_the_template_adds(template: int, shared_prefix: bool) -> None:
    with serving(ChatServer(template_tokens=template)) as server:
        prompts = calibrated(server, book(tokens=1000, shared_prefix=shared_prefix))
    assert len(server.calibrations) == 2
    assert not server.streamed
    for wanted in (100, 1000, 5000):
        (message,) = prompts.single(5, wanted)
        assert template + len(message["content"]) / CHARACTERS_PER_TOKEN == pytest.approx(wanted, rel=0.01, abs=2)


def test_a_server_that_counts_wrongly_is_refused() -> None:
    with (
        serving(ChatServer(fixed_count=7)) as server,
        pytest.raises(ServerUnusable, match=r"usage\.prompt_tokens at 7"),
    ):
        calibrated(server, book(tokens=1000))


def test_calibration_tries_less_text_on_a_server_with_a_short_context() -> None:
    with serving(ChatServer(largest_prompt=300)) as server:
        prompts = calibrated(server, book(tokens=1000))
        assert prompts.characters_per_token == pytest.approx(CHARACTERS_PER_TOKEN, rel=0.1)
        server.largest_prompt = 10
        with pytest.raises(ServerUnusable, match=r"400.*too long"):
            calibrated(server, book(tokens=1000))


def test_a_one_line_prompt_needs_no_calibration() -> None:
    with serving(ChatServer()) as server:
        calibrated(server, book(tokens=0))
    assert not server.calibrations


def test_exactly_the_asked_share_hangs_up_and_the_seed_says_who() -> None:
    options = parse_options(["--disconnect-fraction", "0.3", "--seed", "4"])
    chosen = choose_hangups(options, 50, ttft=0.2)
    assert len(chosen) == 15
    assert chosen == choose_hangups(options, 50, ttft=0.2)
    assert chosen.keys() != choose_hangups(parse_options(["--disconnect-fraction", "0.3", "--seed", "5"]), 50, 0.2).keys()
    assert all(hangup.after_seconds is not None and 0 <= hangup.after_seconds < 0.2 for hangup in chosen.values())
    assert all(hangup.after_chunks == 1 for hangup in chosen.values())


def test_random_hangups_fall_into_prefill_and_into_decode() -> None:
    options = parse_options(["--disconnect-fraction", "1", "--disconnect-after", "random", "--max-tokens", "20"])
    hangups = choose_hangups(options, 200, ttft=0.2).values()
    in_decode = [hangup.after_chunks for hangup in hangups if hangup.after_seconds is None]
    assert 60 < len(in_decode) < 140
    assert set(in_decode) <= set(range(1, 21))
    assert len(set(in_decode)) > 10
