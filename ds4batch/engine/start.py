"""A loaded model as the engine process serves it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import ds4batch.messages as m
from ds4batch.engine.build import Built, build
from ds4batch.engine.checkpoint_store import open_checkpoints
from ds4batch.engine.constraint import constraints_of
from ds4batch.engine.options import options_of
from ds4batch.engine.service import Service
from ds4batch.engine.vocabulary import TokenizerVocabulary
from ds4batch.engine.weights.config import ModelError
from ds4batch.settings import Settings
from ds4batch.tokenizer import ModelTokenizer, load_tokenizer


def start(settings: Settings, wake: Callable[[], None]) -> tuple[m.Ready, Service]:
    """Load the model. Raises OSError and ValueError, naming the file, the option or the numbers."""
    tokenizer = load_tokenizer(settings.model)
    built = build(settings)
    _same_vocabulary(tokenizer, built, settings.model)
    service = Service(
        built.engine,
        TokenizerVocabulary(tokenizer),
        time.monotonic,
        settings.batched_session,
        options_of(settings, built.engine.model.device.type),
        fallback=lambda: built.engine.last_fallback,
        memory=_device_memory(built, settings),
        checkpoints=open_checkpoints(settings, built, wake),
        constraints=constraints_of(tokenizer),
    )
    return _ready(built), service


def _same_vocabulary(tokenizer: ModelTokenizer, built: Built, model: str) -> None:
    rows = built.engine.model.config.vocab
    if tokenizer.vocab_size > rows:
        raise ModelError(f"{model}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {rows} rows")


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
