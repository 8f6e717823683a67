"""The scripted model as the engine process serves it. Needs no torch, so that it starts at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import ds4batch.messages as m
from ds4batch.engine.constraint import constraints_of
from ds4batch.engine.options import options_of
from ds4batch.engine.service import Service
from ds4batch.engine.vocabulary import TokenizerVocabulary
from ds4batch.scripted.backend import ScriptedBackend
from ds4batch.scripted.script import read_script
from ds4batch.scripted.vocabulary import scripted_tokenizer
from ds4batch.settings import Settings


def start(settings: Settings, wake: Callable[[], None]) -> tuple[m.Ready, Service]:
    """Read the script. Raises OSError and ValueError naming the file. Nothing wakes it but messages."""
    script, tokenizer = read_script(settings.script), scripted_tokenizer(settings.script)
    backend = ScriptedBackend(script, tokenizer, settings.batched_session, settings.ctx)
    options = options_of(settings, "cpu")
    service = Service(
        backend,
        TokenizerVocabulary(tokenizer),
        time.monotonic,
        settings.batched_session,
        options,
        constraints=constraints_of(tokenizer),
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
