"""`ds4batch serve`: the order of start and stop of the whole front. Returns exit codes, prints what a person should see."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

from ds4batch import logs
from ds4batch.chat.dialects.choose import choose, facts_of
from ds4batch.chat.template import template_for
from ds4batch.scripted.script import read_script
from ds4batch.scripted.vocabulary import scripted_tokenizer
from ds4batch.server import files
from ds4batch.server.app import FrontServer
from ds4batch.server.engine_link import ENGINE_COMMAND, EngineLink, EngineStartError
from ds4batch.server.garbage import keep_what_is_there
from ds4batch.server.keys import KeyFileError, Keys
from ds4batch.server.listen import BACKLOG, ListenError, listen
from ds4batch.server.metrics import Metrics
from ds4batch.server.notify import Notifier
from ds4batch.server.request_log import RequestLog
from ds4batch.server.service import Service, TextModel
from ds4batch.server.tls import Certificate, TlsError
from ds4batch.server.tool_memory import ToolMemory
from ds4batch.server.tool_trailers import ToolTrailers
from ds4batch.server.watch import ConnectionWatch
from ds4batch.server.watchdog import Watchdog
from ds4batch.settings import Settings
from ds4batch.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

INTERRUPTED = 130
ENGINE_STOP_SECONDS = 7.0
SAVE_SECONDS = 600.0
"""That the engine may take to save its sessions before it is killed; a second signal ends it at once."""
HANDLER_STOP_SECONDS = 2.0
_WORKERS = 2  # threads that parse and tokenise long requests
_SWITCH_SECONDS = 0.001  # the interpreter's lock moves between threads this often, so that parsing does not hold up the loop


def serve(
    settings: Settings, *, engine_command: Sequence[str] = ENGINE_COMMAND, load: Callable[[Settings], TextModel] | None = None
) -> int:
    """Serve until a signal ends it. The exit code: 0, 1 with a message on stderr, or 130 after a second signal."""
    logs.configure(settings.log_format, settings.log_level)
    try:
        requests = RequestLog(settings)
        keys = Keys(settings.api_key_file) if settings.api_key_file else None
        certificate = Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
        sockets = listen(settings.host, settings.port)
    except (OSError, ListenError, KeyFileError, TlsError) as error:
        return _refuse(error)
    try:
        model = (load or load_text_model)(settings)
    except (OSError, ValueError) as error:
        return _refuse(error)
    sys.setswitchinterval(_SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Front(settings, model, sockets, requests, engine_command, keys, certificate).run())


def load_text_model(settings: Settings) -> TextModel:
    """The tokenizer and the dialect of the model file, or of a script. Raises OSError or ValueError naming what is wrong."""
    if settings.script:
        script, tokenizer = read_script(settings.script), scripted_tokenizer(settings.script)
        wanted = script.dialect if settings.dialect == "auto" else settings.dialect
    else:
        tokenizer, wanted = load_tokenizer(settings.model), settings.dialect
    dialect = choose(tokenizer.architecture, facts_of(tokenizer, template_for(tokenizer)), wanted)
    return TextModel(model_id(settings), tokenizer.model_name, tokenizer, dialect)


def model_id(settings: Settings) -> str:
    """The id in /v1/models: --served-name, else the file's name without its suffix."""
    path = Path(settings.script or settings.model).resolve()
    return settings.served_name or (path.name if path.is_dir() else path.stem)


def _refuse(error: Exception) -> int:
    print(f"ds4batch: {error}", file=sys.stderr, flush=True)
    return 1


class _Front:
    """One run of the server."""

    def __init__(
        self,
        settings: Settings,
        model: TextModel,
        sockets: list[socket.socket],
        requests: RequestLog,
        engine_command: Sequence[str],
        keys: Keys | None,
        certificate: Certificate | None,
    ) -> None:
        self._settings = settings
        self._model = model
        self._sockets = sockets
        self._requests = requests
        self._engine_command = engine_command
        self._keys = keys
        self._certificate = certificate
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Start, wait, stop."""
        metrics = Metrics(self._settings, self._model.id)
        directory = self._settings.kv_disk_dir
        most = 0 if self._settings.disable_exact_dsml_tool_replay else self._settings.tool_memory_max_ids
        memory = ToolMemory(most, ToolTrailers(Path(directory), most) if directory else None)
        link = EngineLink(self._settings, metrics, command=self._engine_command)
        pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="prompt")
        service = Service(self._settings, self._model, link, metrics, ConnectionWatch(), pool, self._requests, memory, self._keys)
        server = FrontServer(service)
        watchdog = Watchdog(link, self._settings.stall_timeout)
        notifier = Notifier.from_environment()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, link)
        if self._requests.has_files or notifier.is_service:  # else SIGHUP is what it is to any program: its terminal has gone
            loop.add_signal_handler(signal.SIGHUP, self._requests.reopen)
        listeners = [await loop.create_server(server, sock=sock, backlog=BACKLOG, **self._tls()) for sock in self._sockets]
        polling = asyncio.create_task(files.poll([one for one in (self._keys, self._certificate) if one is not None]))
        watching = asyncio.create_task(service.watch.run())
        running = asyncio.create_task(link.run())
        announcing = asyncio.create_task(self._announce(link, notifier))
        guarding = asyncio.create_task(watchdog.run())
        notifying = asyncio.create_task(notifier.run(lambda: watchdog.alive))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for listener in listeners:
                listener.close()
            notifier.stopping()
            server.pre_shutdown()
            if not running.done():
                await link.stop(SAVE_SECONDS if self._settings.kv_disk_dir else ENGINE_STOP_SECONDS)
            await server.shutdown(HANDLER_STOP_SECONDS)
            await running
        except EngineStartError as error:
            return _refuse(error)
        finally:
            for task in (announcing, stopping, watching, polling, guarding, notifying):
                task.cancel()
            pool.shutdown(wait=False, cancel_futures=True)
            self._requests.close()
        return 0

    def _tls(self) -> dict[str, Any]:
        """What makes a listener speak TLS."""
        if self._certificate is None:
            return {}
        return {
            "ssl": self._certificate.context,
            "ssl_handshake_timeout": self._settings.header_timeout or None,
            "ssl_shutdown_timeout": HANDLER_STOP_SECONDS,
        }

    async def _announce(self, link: EngineLink, notifier: Notifier) -> None:
        await link.first_ready.wait()
        keep_what_is_there()
        notifier.ready(f"serving {self._model.id}")
        host, port = self._sockets[0].getsockname()[:2]
        scheme = "http" if self._certificate is None else "https"
        shown = f"[{host}]" if ":" in host else host
        print(
            f"ds4batch: ready on {scheme}://{shown}:{port} ({self._model.id}, {self._settings.batched_session} sessions x "
            f"{self._settings.ctx} tokens)",
            flush=True,
        )

    def _on_signal(self, link: EngineLink) -> None:
        if self._stop.is_set():
            link.kill()
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(INTERRUPTED)
        self._stop.set()
        with contextlib.suppress(OSError):  # whoever read this may have left
            print("ds4batch: stopping; a second signal ends it at once", file=sys.stderr, flush=True)
