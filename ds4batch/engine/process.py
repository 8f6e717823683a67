"""The engine process: owns the device, steps while there is work, and leaves when the front does.

Started by the front as `python -m ds4batch.engine.process --fd N`; see ds4batch.messages for what goes over the socket.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable

import torch

import ds4batch.messages as m
from ds4batch.engine.build import Built, build
from ds4batch.engine.channel import Channel, FrontGone
from ds4batch.engine.checkpoint_store import open_checkpoints
from ds4batch.engine.constraint import Constraints
from ds4batch.engine.memory import DoesNotFit
from ds4batch.engine.service import Service
from ds4batch.engine.vocabulary import TokenizerVocabulary
from ds4batch.engine.weights.config import ModelError
from ds4batch.settings import Settings
from ds4batch.tokenizer import ModelTokenizer, load_tokenizer
from scheduler.options import Options

log = logging.getLogger(__name__)


def main() -> int:
    """Serve the front at the other end of --fd until it leaves or says so."""
    parser = argparse.ArgumentParser(prog="ds4batch.engine.process")
    parser.add_argument("--fd", type=int, required=True)
    channel = Channel(parser.parse_args().fd)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="engine: %(message)s")
    # A signal for the whole process group is the front's to answer: it sends Shutdown, or its end closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        settings = channel.settings()
        channel.start()
        _serve(channel, settings)
    except FrontGone:
        return 0
    finally:
        channel.close()
    return 0


def _serve(channel: Channel, settings: Settings) -> None:
    try:
        ready, service = _scripted(settings) if settings.script else _loaded(settings, channel.wake)
    except (ModelError, DoesNotFit, OSError, ValueError) as error:
        channel.send(m.StartFailed(str(error)))
        return
    channel.send(ready)
    gc.collect()
    gc.freeze()  # the model's objects stay; later collections need not walk them
    while True:
        for message in channel.receive(wait=not service.busy or service.blocked):
            service.handle(message)
        if service.busy:
            channel.send(service.step())
        elif service.stopping:
            service.close()
            channel.send(m.Bye())
            return


def _loaded(settings: Settings, wake: Callable[[], None]) -> tuple[m.Ready, Service]:
    tokenizer = load_tokenizer(settings.model)
    built = build(settings)
    _same_vocabulary(tokenizer, built, settings.model)
    service = Service(
        built.engine,
        TokenizerVocabulary(tokenizer),
        time.monotonic,
        settings.batched_session,
        options_of(settings, built.engine.model.device),
        fallback=lambda: built.engine.last_fallback,
        memory=_device_memory(built, settings),
        checkpoints=open_checkpoints(settings, built, wake),
        constraints=_constraints(tokenizer),
    )
    return _ready(built), service


def _scripted(settings: Settings) -> tuple[m.Ready, Service]:
    from ds4batch.scripted.backend import ScriptedBackend
    from ds4batch.scripted.script import read_script
    from ds4batch.scripted.vocabulary import scripted_tokenizer

    script, tokenizer = read_script(settings.script), scripted_tokenizer(settings.script)
    backend = ScriptedBackend(script, tokenizer, settings.batched_session, settings.ctx)
    options = options_of(settings, torch.device("cpu"))
    service = Service(
        backend,
        TokenizerVocabulary(tokenizer),
        time.monotonic,
        settings.batched_session,
        options,
        constraints=_constraints(tokenizer),
    )
    ready = m.Ready(
        device="script",
        dtype="none",
        parameters=0,
        exact_path="native",
        page_tokens=backend.room().page_tokens,
        memory={},
        load_seconds=0.0,
    )
    return ready, service


def _constraints(tokenizer: ModelTokenizer) -> Constraints | None:
    """None for a vocabulary without a token that ends an answer: nothing could end what is held to a form."""
    return Constraints(tokenizer) if tokenizer.stop_ids else None


def _same_vocabulary(tokenizer: ModelTokenizer, built: Built, model: str) -> None:
    rows = built.engine.model.config.vocab
    if tokenizer.vocab_size > rows:
        raise ModelError(f"{model}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {rows} rows")


def options_of(settings: Settings, device: torch.device) -> Options:
    """The scheduler's numbers for this device."""
    settings = settings.resolved(device.type)
    return Options(
        mixed_prefill_quantum=settings.mixed_prefill_quantum,
        idle_prefill_quantum=settings.idle_prefill_quantum,
        itl_budget=settings.itl_budget_ms / 1000,
        max_queue=settings.queue_limit,
        overlap=device.type == "cuda",
    )


def _ready(built: Built) -> m.Ready:
    model, pool = built.engine.model, built.engine.pool
    return m.Ready(
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=built.parameters,
        exact_path="native" if built.engine.path.native else "ordered",
        page_tokens=pool.shape.page_tokens,
        memory=built.need.as_dict(),
        load_seconds=built.seconds,
    )


def _device_memory(built: Built, settings: Settings) -> Callable[[], int]:
    device = built.engine.model.device
    if settings.gpu_stats and device.type == "cuda":
        return lambda: torch.cuda.memory_allocated(device)
    return lambda: 0


if __name__ == "__main__":
    sys.exit(main())
