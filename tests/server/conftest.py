from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from harness import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A front with four sessions, shared by tests that leave nothing behind."""
    with running({"batched_session": 4, "ctx": 4096}) as started:
        yield started
