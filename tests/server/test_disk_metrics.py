"""The series about checkpoints go on through an engine's restarts; the anchor is what the dialect says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ds4batch.chat.conversation import Conversation, Message
from ds4batch.chat.dialects.base import Rendered
from ds4batch.messages import DiskStat, Transfer
from ds4batch.server.anchor import anchor
from ds4batch.server.disk_metrics import DiskMetrics
from ds4batch.server.metric_series import Series


def totals(**changes: Any) -> DiskStat:
    empty: dict[str, Any] = {key: {} for key in ("stored", "known", "skipped", "loaded", "evicted", "removed", "left")}
    return DiskStat(**({"files": 1, "bytes": 10} | empty | changes))


def test_counts_of_an_engine_are_added_up_over_its_lives() -> None:
    registry = CollectorRegistry()
    disk = DiskMetrics(Series(registry, "m"))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})

    assert value("ds4batch_disk_store_total", reason="evict") == 0
    disk.stats(totals(stored={"evict": 2}, skipped={"no_space": 1}))
    disk.stats(totals(stored={"evict": 3}))
    disk.engine_down()
    disk.stats(totals(stored={"evict": 1}, files=4, bytes=99))
    assert value("ds4batch_disk_store_total", reason="evict") == 4
    assert value("ds4batch_disk_skipped_total", reason="no_space") == 1
    assert (value("ds4batch_disk_files"), value("ds4batch_disk_bytes")) == (4, 99)
    disk.transfer(Transfer(True, 0.02, 500))
    disk.transfer(Transfer(False, 0.5, 700))
    assert (value("ds4batch_disk_load_bytes_total"), value("ds4batch_disk_store_bytes_total")) == (500, 700)
    assert value("ds4batch_disk_load_seconds_bucket", le="0.025") == 1
    assert value("ds4batch_disk_store_seconds_sum") == 0.5


def said(*roles: Any) -> Conversation:
    return Conversation([Message(role, f"{role} {i}") for i, role in enumerate(roles)])


def shown(conversation: Conversation) -> str:
    return "".join(f"<{message.role}>{message.text}|" for message in conversation.messages)


class Tags:
    """A dialect as far as the anchor asks it."""

    def render(self, conversation: Conversation) -> Rendered:
        if conversation.messages[0].role == "tool":
            raise ValueError("a conversation begins otherwise")
        text = shown(conversation)
        return Rendered(f"{text}<assistant>", len(text), False)


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    ("roles", "before"),
    [
        (("system", "user"), 1),
        (("system", "user", "user", "assistant", "user"), 2),
        (("user", "assistant", "user"), 0),
        (("system",), 0),
        (("tool", "user"), 0),
    ],
)
@pytest.mark.parametrize("beginning", [[], [0]])
def test_the_anchor_is_before_the_last_user_message_that_precedes_an_answer(
    roles: tuple[str, ...], before: int, beginning: list[int]
) -> None:
    talk = said(*roles)
    text = f"{shown(talk)}<assistant>"
    found = anchor([*beginning, *encode(text)], text, talk, Tags(), encode)  # type: ignore[arg-type]
    head = replace(talk, messages=talk.messages[:before])
    assert found == (len(beginning) + len(shown(head)) if before else 0)


def test_a_dialect_that_renders_the_beginning_otherwise_has_no_anchor() -> None:
    talk = said("system", "user")
    assert anchor(encode("no such text"), "no such text", talk, Tags(), encode) == 0  # type: ignore[arg-type]
    text = shown(talk)
    assert anchor(encode("xy" + text), text, talk, Tags(), encode) == 0  # type: ignore[arg-type]
