"""The process log, of both processes on stderr: lines for people, or one JSON object a line."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
ENGINE_TEXT = "%(asctime)s %(levelname)s engine: %(message)s"


class JsonFormatter(logging.Formatter):
    """time (ISO 8601, UTC), level, process, logger, message; where there are any, `traceback`, and the `request` it is about."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        if hasattr(record, "request"):
            line["request"] = record.request
        return msgspec.json.encode(line).decode()


def configure(form: str, level: str, *, engine: bool = False) -> None:
    """Log to stderr from now on. `form`: text or json; `level`: debug, info, warning or error."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonFormatter("engine" if engine else "server"))
    else:
        handler.setFormatter(logging.Formatter(ENGINE_TEXT if engine else TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
