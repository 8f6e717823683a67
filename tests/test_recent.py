from __future__ import annotations

from functools import partial

import pytest

from ds4batch.recent import Recent


def test_what_was_used_last_is_kept_within_the_weight() -> None:
    made: list[str] = []

    def make(key: str) -> str:
        made.append(key)
        return key.upper()

    kept: Recent[str, str] = Recent(10)
    for key, weight in (("a", 4), ("b", 4), ("a", 4), ("c", 4)):
        assert kept.get(key, partial(make, key), weight) == key.upper()
    assert made == ["a", "b", "c"]
    assert kept.weight == 8
    assert kept.get("a", lambda: make("a"), 4) == "A"  # b went, which was used before it
    assert made == ["a", "b", "c"]
    kept.get("b", lambda: make("b"), 4)
    assert made[-1] == "b"


def test_what_is_heavier_than_all_is_made_and_not_kept() -> None:
    kept: Recent[str, int] = Recent(10)
    kept.get("a", lambda: 1, 5)
    assert [kept.get("big", lambda: 2, 11) for _ in range(2)] == [2, 2]
    assert (kept.weight, kept.get("a", lambda: 3, 5)) == (5, 1)


def test_what_cannot_be_made_is_not_kept() -> None:
    def fail() -> int:
        raise KeyError("x")

    kept: Recent[str, int] = Recent(10)
    with pytest.raises(KeyError):
        kept.get("a", fail)
    assert kept.get("a", lambda: 1) == 1
