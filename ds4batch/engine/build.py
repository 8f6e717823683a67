"""From settings to an engine: open the model, check that it fits, load it, probe its exactness."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ds4batch.engine.draft.build import draft_need, drafter_of, head_of
from ds4batch.engine.draft.drafter import Drafter
from ds4batch.engine.engine import Engine
from ds4batch.engine.exact import TILE, ExactPath, decide
from ds4batch.engine.memory import DoesNotFit, Extra, Need, available, estimate, expanded_bytes, require, weight_bytes
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.hybrid import HybridModel, extra_need
from ds4batch.engine.models.hybrid_load import loaded_bytes
from ds4batch.engine.models.model import Model
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.progress import LoadProgress
from ds4batch.engine.rows import SPLIT
from ds4batch.engine.sampler import Draw
from ds4batch.engine.weights.config import ModelConfig, ModelError
from ds4batch.engine.weights.hybrid_layout import HybridConfig
from ds4batch.engine.weights.layout import tensor_shapes
from ds4batch.engine.weights.source import WeightSource, open_weights
from ds4batch.messages import Sampling
from ds4batch.settings import Settings
from scheduler.backend import Pick, Work
from scheduler.survey import Survey
from triton_kernels.quant_formats import Format

log = logging.getLogger(__name__)


class Built(NamedTuple):
    """An engine ready to serve, and what it took."""

    engine: Engine
    need: Need
    parameters: int
    seconds: float
    weights: tuple[Path, ...]  # the files they came from


def build(settings: Settings, path: ExactPath | None = None) -> Built:
    """Load `settings.model` for `settings.batched_session` sessions.

    Raises ModelError for a file that cannot be served and DoesNotFit when the sessions would not fit, both before memory is
    taken. `path` skips the probes (for tests that force one).
    """
    start = time.monotonic()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    settings = settings.resolved(device.type)
    dtype = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}[settings.dtype]
    source = open_source(settings, device, dtype)
    config = source.config
    if isinstance(config, HybridConfig) and device.type != "cpu":
        raise ModelError(f"{settings.model}: models of the family {config.family} run on a CPU; use --device cpu")
    head = head_of(settings, config)
    keep = kept(settings, config, device, dtype)
    if settings.ctx > config.context:
        log.warning("--ctx %d is beyond the %d positions the model was trained on", settings.ctx, config.context)
    page_tokens = page_size(settings, device)
    shape = PageShape(config.kv_layers, config.kv_heads, page_tokens, config.head_dim, kv_type(settings, config, device, dtype))
    per_session = -(-settings.ctx // page_tokens)
    slots, drafts = settings.batched_session, settings.drafts
    rows = slots * (1 + drafts) + max(settings.idle_prefill_quantum, settings.mixed_prefill_quantum)
    if isinstance(config, HybridConfig):
        loaded, extra = loaded_bytes(source, config, device, dtype), extra_need(config, drafts)
    else:
        loaded, extra = weight_bytes(source, device, dtype, keep), Extra(scratch=expanded_bytes(source, dtype, keep))
    module, beside = draft_need(settings, config, dtype)
    loaded, extra = loaded + module, Extra(*(a + b for a, b in zip(extra, beside, strict=True)))
    need = estimate(config, shape, per_session, slots, loaded, rows, extra)
    pages = pool_pages(settings, page_tokens)
    if pages < per_session * slots:
        need = need._replace(pool=pages * shape.bytes + slots * extra.session)
    require(need, available(device))
    log.info("%s", need.describe())
    with LoadProgress(config.name, map(source.extent, source.names()), sys.stderr) as progress:
        model = load_model(source, device, dtype, settings.ctx, lambda name: progress.advance(source.extent(name)), keep)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the conversion of the largest tensor took
    pool = PagePool(shape, pages, device, model.new_state(slots, drafts))
    drafter = drafter_of(settings, model, slots, head)
    engine = assemble(model, pool, slots, settings.ctx, rows, path, drafter=drafter, drafts=drafts)
    if device.type == "cuda":
        warm_up(engine, rows, drafts)
    path = engine.path
    log.info(
        "exact path: %s",
        f"native, rows padded to multiples of {path.row_multiple}"
        if path.native
        else f"ordered, one session at a time in tiles of {TILE} rows: {path.reason}",
    )
    return Built(engine, need._replace(weights=model.bytes), source.parameters, time.monotonic() - start, _files(source))


def _files(source: WeightSource) -> tuple[Path, ...]:
    """The files of all tensors; none for generated ones."""
    files = {Path(source.extent(name).file) for name in source.names()}
    return tuple(sorted(file for file in files if file.is_file()))


def load_model(
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    ctx: int,
    progress: Callable[[str], None],
    keep: frozenset[Format],
) -> Model:
    """The model of the source's family, loaded."""
    if isinstance(source.config, HybridConfig):
        return HybridModel(source, device, dtype, ctx, progress)
    return DenseModel(source, device, dtype, ctx, progress, keep)


def assemble(
    model: Model,
    pool: PagePool,
    slots: int,
    ctx: int,
    rows: int,
    path: ExactPath | None = None,
    graphs: bool = True,
    drafter: Drafter | None = None,
    drafts: int = 0,
) -> Engine:
    """An engine over a loaded model: on our kernels where they can run it, else on plain torch as the probes allow.

    `rows` is the most rows of a forward, `drafts` the most that one checks for a session. `path` skips the probes.
    """
    drawn = slots * (1 + drafts)
    if path is None and model.device.type == "cuda" and isinstance(model, DenseModel):
        from ds4batch.engine.device_sampler import DeviceSampler
        from ds4batch.engine.draft.mtp_cuda import CudaMtpDrafter
        from ds4batch.engine.models import dense_cuda

        reason = dense_cuda.supported(model.config, model.device, model.dtype)
        if not reason:
            keeper = drafter if isinstance(drafter, CudaMtpDrafter) else None
            forward = dense_cuda.CudaForward(model, pool, slots, ctx, rows, graphs, drafts, keeper)
            sampler = DeviceSampler(drawn, model.config.vocab, model.device, forward.drawn)
            return Engine(model, pool, slots, ctx, ExactPath(True, 1, ""), forward, sampler, drafter)
        log.warning("kernels cannot run this model: %s", reason)
    return Engine(model, pool, slots, ctx, path or decide(model, drawn, rows), drafter=drafter)


def warm_up(engine: Engine, most: int, drafts: int = 0) -> None:
    """Run each kind of step once, so that no request waits for a kernel to be compiled or a graph to be recorded.

    The sessions are empty before and after. `most` is the most rows of a forward, `drafts` the most of a session.
    """
    from ds4batch.engine.models.dense_cuda import BUCKETS, ROWS, bucket_of

    slots = min(len(engine.sessions), engine.pool.pages)  # no more can hold a page at once
    widths = [b for b in BUCKETS if b < slots]
    for rows in [*widths, slots]:
        engine.launch([Work(slot, [0], True) for slot in range(rows)])
    for sampling in (
        Sampling(temperature=0.0),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.0, top_p=0.5),
    ):
        draw = Draw(sampling, [0], ())
        engine.sample([Pick(slot, draw) for slot in range(slots)])
    for rows in [*widths, slots] if drafts else ():
        engine.launch(_checks(engine, range(rows), drafts))
    for decoders, guessed in sorted({(0, 0), (slots - 1, 0), (slots - 1, drafts)}):
        filled = bucket_of(slots) * (1 + guessed) if decoders else 0  # decode rows, with those that fill them up
        for tokens in [rows - filled for rows in (*ROWS, ROWS[-1] + 1)]:
            engine.truncate(0, 0)
            work = [Work(0, [0] * tokens, True), *_checks(engine, range(1, decoders + 1), guessed)]
            if 1 < tokens < engine.ctx and tokens + filled <= most and not engine.shortage(work):
                engine.launch(work)
    if engine.model.device.type == "cuda" and slots > 1:
        engine.survey = survey(engine, slots, most)
    for slot in range(slots):
        engine.truncate(slot, 0)
    engine.native_forwards = 0
    engine.fallbacks.clear()


def _checks(engine: Engine, slots: Iterable[int], drafts: int) -> list[Work]:
    """A decode row for each slot, with drafts where these are wanted and made."""
    wants = [(slot, 0) for slot in slots]
    for slot, _ in wants:
        engine.truncate(slot, min(len(engine.tokens(slot)), 8))  # without the drafts of the step before
    made = engine.propose(wants, drafts) if drafts and wants else [0] * len(wants)
    return [Work(slot, [token], True, count) for (slot, token), count in zip(wants, made, strict=True)]


_SURVEY_DEPTHS = (8192, 16384)  # tokens, beside 0

SMALL = 1 << 30
"""Bytes of weights, converted, below which none stay quantised: such steps are bound by launches, and plain products start sooner."""


def survey(engine: Engine, slots: int, most: int) -> Survey | None:
    """Time chunks beside `slots` - 1 decoders, at the beginning of a prompt and deep in it; None where the pool is too small.

    Changes the sessions.
    """
    from ds4batch.engine.models.dense_cuda import ROWS, bucket_of

    depths = sorted({0, *(min(depth, engine.ctx // 2) for depth in _SURVEY_DEPTHS)})
    deepest = depths[-1]
    filled = bucket_of(slots)
    sizes = [rows - filled for rows in ROWS if 1 < rows - filled <= min(most - slots, engine.ctx - deepest - 1)]
    others = [Work(slot, [0], True) for slot in range(1, slots)]
    for slot in range(slots):
        engine.truncate(slot, 0)
    if not sizes or engine.shortage([Work(0, [0] * (deepest + sizes[-1]), True), *others]):
        return None

    def seconds(at: int, tokens: int) -> float:
        work = [Work(0, [0] * tokens, True), *others] if tokens else others
        found = []
        for _ in range(3):
            for slot in range(1, slots):
                engine.truncate(slot, 0)
            engine.truncate(0, at)
            torch.cuda.synchronize()
            start = time.monotonic()
            engine.launch(work)
            torch.cuda.synchronize()
            found.append(time.monotonic() - start)
        return sorted(found)[1]

    alone, prices, held = seconds(0, 0), [], 0
    for depth in depths:
        engine.truncate(0, held)
        for at in range(held, depth, most - slots):
            engine.launch([Work(0, [0] * min(most - slots, depth - at), False)])
        held = depth
        prices.append(tuple(max(0.0, seconds(depth, tokens) - alone) for tokens in sizes))
    return Survey(tuple(sizes), tuple(depths), tuple(prices))


def open_source(settings: Settings, device: torch.device, dtype: torch.dtype) -> WeightSource:
    """Where the weights come from: the model's files, or a generator with --load-format dummy."""
    if settings.load_format == "dummy":
        from ds4batch.engine.weights.dummy import open_dummy

        return open_dummy(settings.model, device, dtype)
    return open_weights(settings.model)


def kept(settings: Settings, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> frozenset[Format]:
    """The formats that stay quantised in memory: those that kernels read, where kernels run the model and it is not small."""
    if settings.dequantise or device.type != "cuda" or _parameters(config) * dtype.itemsize < SMALL:
        return frozenset()
    from ds4batch.engine.linear_cuda import quantised_formats
    from ds4batch.engine.models import dense_cuda

    return frozenset() if dense_cuda.supported(config, device, dtype) else quantised_formats(device)


def _parameters(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def choose_device(name: str) -> torch.device:
    """The device that --device means. Raises ModelError where it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch finds no CUDA device")
    return torch.device(name)


def kv_type(settings: Settings, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Type of keys and values in the pool. Raises ModelError where the one that was asked for cannot be had."""
    choice = settings.kv_cache_dtype
    if choice == "auto" and device.type != "cuda":
        return torch.float32
    from ds4batch.engine.models.dense_cuda import supported

    reason = supported(config, device, dtype)
    if choice == "auto":
        return torch.float32 if reason else torch.bfloat16
    if not reason and choice == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        reason = "no card of compute capability 8.9"
    if reason:
        raise ModelError(f"--kv-cache-dtype {choice}: only the GPU kernels can read it, and they cannot run: {reason}")
    return torch.float8_e4m3fn if choice == "fp8" else torch.bfloat16


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


def pool_pages(settings: Settings, page_tokens: int) -> int:
    """Pages of the pool: what --kv-pool-tokens fill, at most a whole context for every session.

    Raises DoesNotFit when not even one session of the context's length would fit: nobody could be sure to finish.
    """
    one = -(-settings.ctx // page_tokens)
    everybody = one * settings.batched_session
    if not settings.kv_pool_tokens:
        return everybody
    pages = settings.kv_pool_tokens // page_tokens
    if pages < one:
        raise DoesNotFit(
            f"--kv-pool-tokens {settings.kv_pool_tokens}: that is {pages} pages of {page_tokens} tokens, and one session of "
            f"--ctx {settings.ctx} takes {one}, which are {one * page_tokens} tokens"
        )
    return min(pages, everybody)
