"""From the server's settings to the scheduler's numbers."""

from __future__ import annotations

from ds4batch.settings import Settings
from scheduler.options import Options


def options_of(settings: Settings, device: str) -> Options:
    """The scheduler's numbers for a device of this type."""
    settings = settings.resolved(device)
    return Options(
        mixed_prefill_quantum=settings.mixed_prefill_quantum,
        idle_prefill_quantum=settings.idle_prefill_quantum,
        itl_budget=settings.itl_budget_ms / 1000,
        max_queue=settings.queue_limit,
        drafts=settings.drafts,
        overlap=device == "cuda",
    )
