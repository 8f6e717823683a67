"""GET /health: the truth about the engine."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from ds4batch import __version__
from ds4batch.server.engine_link import EngineState
from ds4batch.server.service import Service


class Health(NamedTuple):
    """The answer: 200 while requests are taken, else 503."""

    http_status: int
    body: dict[str, Any]


def health(service: Service) -> Health:
    """Status, and what an operator asks next."""
    engine = service.link.status
    ready = engine.ready
    body: dict[str, Any] = {
        "status": engine.state.value,
        "model": service.model.id,
        "version": __version__,
        "uptime_seconds": round(time.monotonic() - service.started_at, 3),
        "slots": service.settings.batched_session,
        "ctx": service.settings.ctx,
        "requests_in_flight": engine.in_flight,
        "restarts": engine.restarts,
        "last_error": engine.last_error,
        "exact_path": ready.exact_path if ready else None,
        "device": ready.device if ready else None,
        "dtype": ready.dtype if ready else None,
        "engine_pid": service.link.pid,
    }
    return Health(200 if engine.state is EngineState.READY else 503, body)
