"""Stub."""

from typing import Any


def document(levels: bool) -> dict[str, Any]:
    """The document."""
    return {}
