"""The calls of a session are stored with it, by whichever engine holds it now, and known to the next one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import ds4batch.messages as m
from ds4batch.engine.checkpoint import DiskCheckpoints
from ds4batch.engine.service import Service
from ds4batch.engine.tool_blocks import ToolBlocks
from ds4batch.kvstore.format import FLAG_TOOL_MAP
from ds4batch.kvstore.trailer import read_tool_map
from scheduler import Options
from scheduler.checkpoints import Key, NoCheckpoints
from scheduler.fake import END, FakeBackend, ManualClock
from tests.engine.models import engine_of, feed, tiny_model
from tests.engine.test_checkpoint_exactness import PATIENCE, open_store
from tests.engine.test_service import CALL, OPEN, READING, Words

LOOK, COUNT = "\n" + CALL, "\n" + CALL.replace("look", "count")
TEXT = "system" + LOOK + "seen" + COUNT + "counted"


class Life:
    """One engine process with a directory of checkpoints."""

    def __init__(self, directory: Path, most_calls: int = 100) -> None:
        self.engine = engine_of(tiny_model(), 1, 512)
        self.store = open_store(directory)
        self.checkpoints = DiskCheckpoints(self.engine, self.store, lambda: None, most_calls=most_calls)

    def grow(self, length: int) -> None:
        tokens = len(self.engine.sessions[0].tokens)
        feed(self.engine, 0, [i % 100 for i in range(tokens, length)], 64)

    def restore(self, text: str) -> None:
        self.checkpoints.replace(0, None, text)
        end = time.monotonic() + PATIENCE
        while (restored := self.checkpoints.restored(0)) is None:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert restored.tokens

    def end(self, text: str) -> None:
        self.checkpoints.save(0, Key(text), "shutdown")
        self.checkpoints.close()


def stored(directory: Path, text: str) -> dict[str, str] | None:
    """The calls in the trailer of the checkpoint of `text`; None without one."""
    store = open_store(directory)
    entry = store.find(text.encode())
    assert entry is not None
    assert entry.header.text_bytes == len(text.encode())
    trailers = dict(store.trailers())
    assert (entry in trailers) == bool(entry.header.flags & FLAG_TOOL_MAP)
    return read_tool_map(trailers[entry], 100).texts if entry in trailers else None


def test_ids_from_before_a_restart_are_stored_again_with_the_session_that_came_back(tmp_path: Path) -> None:
    one = Life(tmp_path)
    one.checkpoints.tool_blocks.remember(["a", "b"], LOOK)
    one.checkpoints.tool_blocks.remember(["elsewhere"], LOOK.replace("it", "that"))
    one.grow(100)
    one.end("system" + LOOK)
    assert stored(tmp_path, "system" + LOOK) == {"a": LOOK, "b": LOOK}
    two = Life(tmp_path)
    two.restore(TEXT)
    two.checkpoints.tool_blocks.remember(["c"], COUNT)
    two.grow(150)
    two.end(TEXT)
    assert stored(tmp_path, TEXT) == {"a": LOOK, "b": LOOK, "c": COUNT}


def test_they_are_stored_too_where_the_session_was_evaluated_anew(tmp_path: Path) -> None:
    one = Life(tmp_path)
    one.checkpoints.tool_blocks.remember(["a"], LOOK)
    one.grow(100)
    one.end("another beginning" + LOOK)
    two = Life(tmp_path)
    next(tmp_path.iterdir()).unlink()  # it made room, say
    two.grow(100)
    two.end(TEXT)
    assert stored(tmp_path, TEXT) == {"a": LOOK}


def test_a_neighbours_checkpoint_brings_its_calls(tmp_path: Path) -> None:
    here, neighbour = Life(tmp_path), Life(tmp_path)
    neighbour.checkpoints.tool_blocks.remember(["a"], LOOK)
    neighbour.grow(100)
    neighbour.end("system" + LOOK)
    here.store.refresh()
    here.restore(TEXT)
    here.grow(150)
    here.end(TEXT)
    assert stored(tmp_path, TEXT) == {"a": LOOK}


def test_a_damaged_trailer_costs_its_calls_and_not_the_session(tmp_path: Path) -> None:
    one = Life(tmp_path)
    one.checkpoints.tool_blocks.remember(["a"], LOOK)
    one.grow(100)
    one.end("system" + LOOK)
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    two = Life(tmp_path)
    two.restore(TEXT)
    assert len(two.checkpoints.tool_blocks) == 0
    two.end("system" + LOOK)
    assert stored(tmp_path, "system" + LOOK) is None


def test_without_exact_replay_nothing_is_stored_or_read(tmp_path: Path) -> None:
    for most in (100, 0):
        life = Life(tmp_path, most)
        assert len(life.checkpoints.tool_blocks) == 0
        life.checkpoints.tool_blocks.remember(["a"], LOOK)
        life.grow(100)
        life.end("system" + LOOK)
        assert stored(tmp_path, "system" + LOOK) == ({"a": LOOK} if most else None)


# the service


class Asked(NoCheckpoints):
    """A store that notes what it would have written of a session that gives way."""

    told = False

    def __init__(self) -> None:
        self.tool_blocks = ToolBlocks(100)
        self.leaving: list[tuple[str, dict[str, str]]] = []

    def replace(self, slot: int, leaving: Key | None, coming: str | None) -> None:
        if leaving is not None:
            self.leaving.append((leaving.text, read_tool_map(self.tool_blocks.trailer(leaving.text), 100).texts))

    def transfers(self) -> list[Any]:
        return []

    @property
    def store(self) -> Any:
        raise AssertionError("nothing has ended")


def service_saying(answer: str, checkpoints: Asked, words: Words) -> Service:
    said = [words.tokenise(letter)[0] for letter in answer]

    def script(history: Sequence[int]) -> int:
        begun = len(history) - 1 - max(i for i, token in enumerate(history) if token == words.tokenise(OPEN)[0])
        return said[begun] if begun < len(said) else END

    options = Options(mixed_prefill_quantum=32, idle_prefill_quantum=128, itl_budget=0.1, max_queue=4)
    service = Service(FakeBackend(1, 2000, script=script), words, ManualClock(), 1, options, checkpoints=checkpoints)  # type: ignore[arg-type]
    service._stats = lambda stats, disk: None  # type: ignore[method-assign,assignment,return-value]
    return service


def ids_of(service: Service, words: Words, texts: Sequence[str], **more: Any) -> list[list[str]]:
    """Asks all at once; the ids of the calls of each answer."""
    for i, text in enumerate(texts):
        rest: dict[str, Any] = {"max_tokens": 200, "sampling": m.Sampling(), "reading": READING, **more}
        service.handle(m.Submit(id=i, tokens=words.tokenise(text), text=text, arrival=0.0, **rest))
    found: list[list[str]] = [[] for _ in texts]
    while service.busy:
        for event in service.step().events:
            if isinstance(event, m.Delta):
                found[event.id] += [one.id for one in event.events if hasattr(one, "name")]
    return found


def test_the_calls_of_an_answer_are_known_before_its_session_gives_way() -> None:
    checkpoints, words = Asked(), Words()
    service = service_saying("I look." + CALL + CALL.replace("it", "that"), checkpoints, words)
    asked = ["<|user|>" + "x" * 40 + OPEN, "<|user|>" + "y" * 40 + OPEN]  # one slot: the first session goes as soon as it ends
    first, _ = ids_of(service, words, asked)
    assert len(first) == 2
    (text, calls), *_ = checkpoints.leaving
    assert text.startswith(asked[0])
    block = CALL + CALL.replace("it", "that")
    assert {call_id: calls[call_id] for call_id in first} == dict.fromkeys(first, block)


@pytest.mark.parametrize(
    ("answer", "more"), [("no calls", {}), (CALL[:30], {}), (CALL, {"max_tokens": 20}), (CALL, {"reading": None})]
)
def test_an_answer_without_whole_calls_leaves_nothing(answer: str, more: dict[str, Any]) -> None:
    checkpoints, words = Asked(), Words()
    ids_of(service_saying(answer, checkpoints, words), words, ["<|user|>x" + OPEN], **more)
    assert len(checkpoints.tool_blocks) == 0
