"""Facts about the card at hand, asked once."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device; 2 for a CPU, so that the interpreter walks every path."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache
def name() -> str:
    """The card's name as launch tables spell it, "" without a card."""
    return torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else ""
