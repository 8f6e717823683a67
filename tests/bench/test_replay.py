"""The replay of conversations: what its clients send, what it takes for new, and that it finds what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.replay import Played, account, play, replay, script
from bench.replay_clients import CLIENTS, ClaudeCode, Codex, Made, OpenCode
from bench.replay_growth import Growth
from bench.replay_transcript import ROUND, Turn, transcript
from clients.server import serving

TURNS = ROUND + 1  # so that a question of the user follows an answer


def test_a_transcript_is_the_same_each_time_and_its_marks_are_in_one_place() -> None:
    story = transcript("x", 40)
    assert story == transcript("x", 40)
    assert story != transcript("y", 40)
    made = Counter(len(turn.calls) for turn in story.turns)
    assert set(made) == {0, 1, 2, 3}
    text = json.dumps(story.turns)
    for number, turn in enumerate(story.turns):
        before = len(story.turns[number - 1].calls) if number else 0
        assert text.count(story.after(number)) == (1 if turn.asked else before)


def test_arguments_come_back_in_schema_order_as_compact_json_or_to_the_byte() -> None:
    sent = '{"timeout": 30.0, "command": "caf\\u00e9"}'
    call = Made("c1", "Bash", sent)
    assert OpenCode("s").written(call) == '{"timeout":30,"command":"café"}'
    block = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {}}
    client, counts = ClaudeCode("s"), {"input_tokens": 0, "cache_creation_input_tokens": 2, "cache_read_input_tokens": 1}
    client.take(
        [
            {"type": "message_start", "message": {"usage": counts}},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": sent}},
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}},
        ]
    )  # fmt: skip
    client.bring([(call, "done")])
    assert json.dumps(client.body()["messages"][0]["content"][0]["input"]) == '{"command": "caf\\u00e9", "timeout": 30}'
    item = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "Bash", "arguments": sent, "status": "completed"}
    codex = Codex("s")
    usage = {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 1}, "output_tokens": 3}
    codex.take(
        [{"type": "response.output_item.done", "item": item}, {"type": "response.completed", "response": {"usage": usage}}]
    )
    assert codex.body()["input"][-1] == {"type": "function_call", "call_id": "c1", "name": "Bash", "arguments": sent}


def test_the_mark_of_the_cache_moves_and_the_words_of_who_pays_change() -> None:
    client = ClaudeCode("s")
    client.ask("one")
    first = client.body()
    client.ask("two")
    second = client.body()
    assert "cache_control" in first["messages"][0]["content"][0]
    assert second["messages"][0] == {"role": "user", "content": "one"}
    assert "cache_control" in second["messages"][1]["content"][0]
    assert first["system"][0] != second["system"][0]
    assert first["system"][1:] == second["system"][1:]


@pytest.mark.parametrize("kind", CLIENTS, ids=lambda client: client.name)
def test_new_is_what_follows_the_last_answer(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"dialect": "glm", "answers": []}))
    growth, client = Growth(path), kind("s")
    client.ask("one")
    first = client.body()
    assert growth.new_tokens(client.api, first, "abc") == 3  # the whole prompt
    said: Any = {"role": "assistant", "content": "so"}
    (client._items if isinstance(client, Codex) else client._messages).append(said)
    client.ask("two")
    added = "<|user|>two<|assistant|><think>"
    assert growth.new_tokens(client.api, client.body(), "anything" + added) == len("two") + 3
    with pytest.raises(ValueError, match="does not end with"):
        growth.new_tokens(client.api, client.body(), "anything")


def test_short_conversations_are_answered_as_scripted_and_evaluate_what_is_new(tmp_path: Path) -> None:
    for played in replay("qwen3.8", CLIENTS, TURNS, tmp_path / "qwen3.8"):
        assert played.problems == []
        assert (played.requests, sum(played.tiers.values())) == (TURNS, TURNS)
        assert played.fine
        assert played.evaluated <= 1.01 * played.new
        assert played.prompts > 2 * played.new


def test_an_answer_that_differs_and_a_history_that_was_changed_are_found(tmp_path: Path) -> None:
    story = transcript("opencode", TURNS)
    client = OpenCode(story.system)
    wrong = list(story.turns)
    wrong[ROUND - 1] = wrong[ROUND - 1]._replace(reasoning="other thoughts")

    class Forgetful(OpenCode):
        """Tells another story of the first answer once the user speaks again."""

        def ask(self, text: str) -> None:
            super().ask(text)
            for message in self._messages[1:4]:
                if message["role"] == "assistant":
                    message["reasoning_content"] = "I forgot."

    with serving(script("glm", [story]), tmp_path / "glm", slots=1) as server:
        played, _ = play(client, story._replace(turns=tuple(wrong)), server.url)
        forgetful = Forgetful(story.system)
        other, sent = play(forgetful, story, server.url)
    assert [problem.partition(" should")[0] for problem in played.problems] == [f"turn {ROUND - 1}: the reasoning"]
    assert not played.fine
    account(other, sent, Growth(tmp_path / "glm" / "scripted.json"), server)
    assert other.problems == []
    assert not other.fine
    assert len(other.suspects) == 1
    assert f"opencode-{ROUND}: " in other.suspects[0]


def test_one_percent_is_the_limit() -> None:
    assert Played("x", "chat", new=1000, again=10).fine
    assert not Played("x", "chat", new=1000, again=11).fine
    assert not Played("x", "chat", new=1000, problems=["wrong"]).fine


def test_a_turn_has_a_result_for_each_call() -> None:
    turns: tuple[Turn, ...] = transcript("z", 40).turns
    assert all(len(turn.calls) == len(turn.results) for turn in turns)
