"""From settings to an engine: open the model, check that it fits, load it, probe its exactness."""

from __future__ import annotations

import logging
import sys
import time
from typing import NamedTuple

import torch

from ds4batch.engine.engine import Engine
from ds4batch.engine.exact import TILE, ExactPath, decide
from ds4batch.engine.memory import Need, available, estimate, require, weight_bytes
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.progress import LoadProgress
from ds4batch.engine.rows import SPLIT
from ds4batch.engine.sampler import Draw
from ds4batch.engine.weights.config import ModelError
from ds4batch.engine.weights.source import open_weights
from ds4batch.messages import Sampling
from ds4batch.settings import Settings
from scheduler.backend import Work

log = logging.getLogger(__name__)


class Built(NamedTuple):
    """An engine ready to serve, and what it took."""

    engine: Engine
    need: Need
    parameters: int
    seconds: float


def build(settings: Settings, path: ExactPath | None = None) -> Built:
    """Load `settings.model` for `settings.batched_session` sessions.

    Raises ModelError for a file that cannot be served and DoesNotFit when the sessions would not fit, both before memory is
    taken. `path` skips the probes (for tests that force one).
    """
    start = time.monotonic()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    dtype = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}[settings.dtype]
    source = open_weights(settings.model)
    config = source.config
    if settings.ctx > config.context:
        log.warning("--ctx %d is beyond the %d positions the model was trained on", settings.ctx, config.context)
    page_tokens = page_size(settings, device)
    kv_dtype = dtype if device.type == "cuda" and dtype != torch.float32 else torch.float32
    shape = PageShape(config.layers, config.kv_heads, page_tokens, config.head_dim, kv_dtype)
    per_session = -(-settings.ctx // page_tokens)
    rows = settings.batched_session + max(settings.idle_prefill_quantum, settings.mixed_prefill_quantum)
    need = estimate(config, shape, per_session, settings.batched_session, weight_bytes(config, dtype), rows)
    require(need, available(device))
    log.info("%s", need.describe())
    with LoadProgress(config.name, len(source.names()), sys.stderr) as progress:
        model = DenseModel(source, device, dtype, settings.ctx, progress.advance)
    pool = PagePool(shape, per_session * settings.batched_session, device)
    engine = assemble(model, pool, settings.batched_session, settings.ctx, rows, path)
    if device.type == "cuda":
        warm_up(engine)
    path = engine.path
    log.info(
        "exact path: %s",
        f"native, rows padded to multiples of {path.row_multiple}"
        if path.native
        else f"ordered, one session at a time in tiles of {TILE} rows: {path.reason}",
    )
    return Built(engine, need._replace(weights=model.bytes), source.parameters, time.monotonic() - start)


def assemble(
    model: DenseModel, pool: PagePool, slots: int, ctx: int, rows: int, path: ExactPath | None = None, graphs: bool = True
) -> Engine:
    """An engine over a loaded model: on our kernels where they can run it, else on plain torch as the probes allow.

    `rows` is the most rows of a forward. `path` skips the probes.
    """
    if path is None and model.device.type == "cuda":
        from ds4batch.engine.device_sampler import DeviceSampler
        from ds4batch.engine.models import dense_cuda

        reason = dense_cuda.supported(model)
        if not reason:
            forward = dense_cuda.CudaForward(model, pool, slots, ctx, rows, graphs)
            sampler = DeviceSampler(slots, model.config.vocab, model.device)
            return Engine(model, pool, slots, ctx, ExactPath(True, 1, ""), forward, sampler)
        log.warning("kernels cannot run this model: %s", reason)
    return Engine(model, pool, slots, ctx, path or decide(model, slots, rows))


def warm_up(engine: Engine) -> None:
    """Run each kind of step once, so that no request waits for a kernel to be compiled or a graph to be recorded.

    The sessions are empty before and after.
    """
    slots = len(engine.sessions)
    widths = [b for b in (1, 2, 4, 8, 16, 32, 64) if b < slots]
    for rows in [*widths, slots]:
        engine.launch([Work(slot, [0], True) for slot in range(rows)])
    for knobs in (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.5},
    ):
        draw = Draw(Sampling(**knobs), [0], ())  # type: ignore[arg-type]
        engine.sample([(slot, draw) for slot in range(slots)])
    for tokens in (20, 40, 256, 257):
        engine.truncate(0, 0)
        if tokens < engine.ctx:
            engine.launch([Work(0, [0] * tokens, True)])
    for slot in range(slots):
        engine.truncate(slot, 0)
    engine.native_forwards = 0
    engine.fallbacks.clear()


def choose_device(name: str) -> torch.device:
    """The device that --device means. Raises ModelError where it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch finds no CUDA device")
    return torch.device(name)


def page_size(settings: Settings, device: torch.device) -> int:
    """Tokens in a page: as asked, else 256 on a GPU and the whole context, in whole splits, on a CPU.

    Raises ModelError for a size that the kernels' splits are not whole multiples of.
    """
    if device.type == "cuda":
        from ds4batch.engine.models.dense_cuda import SPLIT as KERNEL_SPLIT

        size = settings.page_tokens or 256
        if KERNEL_SPLIT % size:
            raise ModelError(f"--page-tokens {size}: on a GPU it must divide {KERNEL_SPLIT}")
        return size
    return settings.page_tokens or -(-settings.ctx // SPLIT) * SPLIT
