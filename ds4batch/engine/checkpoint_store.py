"""Opens the directory of checkpoints for one engine, and says whose checkpoints they are.

The facts of the fingerprint are all that a state's bits depend on: weights, shape, types, the device, the libraries that compute, and
on a CPU its instructions and threads. A server that differs in any of them does not use the state.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from ds4batch.engine.build import Built
from ds4batch.engine.checkpoint import DiskCheckpoints
from ds4batch.kvstore.identity import Identity, fingerprint, weights_identity
from ds4batch.kvstore.options import Options
from ds4batch.kvstore.store import KVStore
from ds4batch.settings import Settings

log = logging.getLogger(__name__)

ARITHMETIC = 3
"""Grows with every change of ours that changes a bit of a state."""


def open_checkpoints(settings: Settings, built: Built, wake: Callable[[], None]) -> DiskCheckpoints | None:
    """The store in --kv-disk-dir, None without one. Raises ValueError for options or a directory that cannot be used."""
    if not settings.kv_disk_dir:
        return None
    store = KVStore(Path(settings.kv_disk_dir), identity(built), options_of(settings))
    log.info("%s", store.describe())
    most_calls = 0 if settings.disable_exact_dsml_tool_replay else settings.tool_memory_max_ids
    return DiskCheckpoints(built.engine, store, wake, most_calls=most_calls)


def options_of(settings: Settings) -> Options:
    """The store's numbers. Raises ValueError, naming the option."""
    try:
        return Options(
            budget_bytes=settings.kv_disk_space_mb << 20,
            max_file_bytes=settings.kv_disk_max_file_mb << 20,
            min_free_bytes=settings.kv_disk_min_free_mb << 20,
            min_tokens=settings.kv_cache_min_tokens,
            cold_max_tokens=settings.kv_cache_cold_max_tokens,
            continued_interval_tokens=settings.kv_cache_continued_interval_tokens,
            boundary_trim_tokens=settings.kv_cache_boundary_trim_tokens,
            boundary_align_tokens=settings.kv_cache_boundary_align_tokens,
        )
    except ValueError as error:
        raise ValueError(f"--kv-cache-{str(error).replace('_', '-', 2)}") from None


def identity(built: Built) -> Identity:
    """Whose checkpoints are ours. Raises OSError when a weight file cannot be read."""
    engine = built.engine
    model, device = engine.model, engine.model.device
    facts: dict[str, object] = {
        "arithmetic": ARITHMETIC,
        "weights": weights_identity(built.weights),
        "config": dataclasses.asdict(model.config),
        "weights_type": str(model.dtype),
        "kv_type": str(engine.pool.shape.dtype),
        "path": list(engine.path),
        "torch": torch.__version__,
        "device": device.type,
    }
    if device.type == "cuda":
        facts["card"] = [torch.cuda.get_device_name(device), *torch.cuda.get_device_capability(device)]
    else:
        facts["cpu"] = [platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    size = sum(file.stat().st_size for file in built.weights)
    bits = round(8 * size / built.parameters) if size else 8 * model.dtype.itemsize
    return Identity(fingerprint(facts), min(max(bits, 1), 255), engine.ctx)
