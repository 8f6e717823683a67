"""Facts about the card at hand, asked once, and the launches that were measured on it."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device; 2 for a CPU, so that the interpreter walks every path."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache
def name() -> str:
    """The card's name as launch tables spell it, "" without a card."""
    return torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else ""


def launches(kind: str) -> dict[str, Any]:
    """What tuned/ holds for this card: launch parameters of one kind of product by a name of the product, empty for a card without any."""
    path = Path(__file__).with_name("tuned") / f"{name()}{kind}.json"
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found
