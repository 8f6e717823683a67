from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.repl.fake_server import FakeServer, serving


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as started:
        yield started
