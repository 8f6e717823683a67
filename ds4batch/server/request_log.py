"""Exactly one record a request to an API's route, however it ended: in the log, or as a line of JSON in a file of its own.

A record is written when the answer has been handed to the connection and the engine has said its last word on the request, so
that its tokens are those that /metrics counts. The trace gets its line at the same moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import msgspec

from ds4batch.server.account import Account
from ds4batch.server.engine_link import EngineState
from ds4batch.server.line_file import LineFile
from ds4batch.server.request_record import CLIENT_GONE, Record, record_of
from ds4batch.server.service import Exchange, Service
from ds4batch.server.told import line
from ds4batch.server.trace import Trace
from ds4batch.settings import Settings

log = logging.getLogger("ds4batch.request")

APIS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "anthropic",
    "/v1/messages/count_tokens": "count_tokens",
}
"""Every route whose requests are recorded."""
_RECORD_BYTES = 2048  # about what one takes


class RequestLog:
    """Writes the records. Raises OSError when a file cannot be opened."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._file = LineFile(settings.request_log, 0o640, "the request log") if settings.request_log else None
        self._trace = Trace(settings.trace) if settings.trace else None

    @property
    def has_files(self) -> bool:
        """Whether there is anything to open anew."""
        return self._file is not None or self._trace is not None

    def ended(self, service: Service, exchange: Exchange, status: int | None) -> None:
        """The answer of a request to one of APIS was handed to the connection; None when there is nobody to take one."""
        account = exchange.account
        account.ended, account.ended_wall = time.monotonic(), time.time()
        account.status = CLIENT_GONE if status is None else status
        if status is None or status == CLIENT_GONE:
            stopping = service.link.status.state is EngineState.STOPPING
            account.gone = account.gone or ("shutdown" if stopping else "client")
        waits = [one.job for one in account.tries if one.job.trail.last is None]
        left = len(waits)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._write(service, exchange)

        if not waits:
            self._write(service, exchange)
        for job in waits:
            job.when_ended(one_less)

    def reopen(self) -> None:
        """Open the files anew, because they may have been renamed."""
        if self._file is not None:
            self._file.reopen()
        if self._trace is not None:
            self._trace.reopen()

    def close(self) -> None:
        """Write what is left."""
        if self._file is not None:
            self._file.close()
        if self._trace is not None:
            self._trace.close()

    def _write(self, service: Service, exchange: Exchange) -> None:
        record = self._record(service, exchange)
        if self._file is not None:
            self._file.add(lambda: msgspec.json.encode(record), _RECORD_BYTES)
        else:
            log.info("%s", line(record), extra={"request": record})
        if self._trace is not None:
            self._trace.add(exchange.account, record, service.model.tokenizer)

    def _record(self, service: Service, exchange: Exchange) -> Record:
        settings, path = self._settings, exchange.request.path
        account: Account = exchange.account
        return record_of(
            account,
            request_id=exchange.request_id,
            key=account.key_name,
            api=APIS[path],
            route=path,
            texts=settings.log_text,
            drafting=settings.drafts > 0,
            device_memory=service.metrics.device_memory if settings.gpu_stats else None,
        )
