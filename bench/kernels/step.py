"""A whole forward on the card against its floors: decode steps against the memory's speed, prefill against cuBLAS and flash attention.

    python -m bench.kernels.step [--model qwen3-8b | FILE] [--format Q8_0] [--cells 1x512,16x512,16x8192,64x512] [--prefill 8192]

The floor of a decode step is the bytes it must read (weights but the input embedding, keys and values) over the read bandwidth measured
in the same run. Before a cell is timed, one of its rows is compared bit for bit with the same session alone.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F

import ds4batch.engine.models.dense_cuda as executor
from bench.kernels import measure
from bench.kernels.peer import TorchStep
from bench.shapes import SHAPES, RandomWeights
from ds4batch.engine.build import assemble
from ds4batch.engine.engine import Engine
from ds4batch.engine.linear_cuda import quantised_formats
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.dense_cuda import CudaForward
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.weights.dummy import MIXED
from ds4batch.engine.weights.source import WeightSource, open_weights
from scheduler.backend import Work
from triton_kernels.quant_formats import Format

PAGE = 256
KV = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
CHUNK = 4096


def main() -> None:
    """Measure the cells and print a line each."""
    parser = argparse.ArgumentParser(prog="step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help=f"one of {', '.join(SHAPES)}, or a model file")
    parser.add_argument("--cells", default="1x512,16x512,16x8192,64x512", help="sessions x context, comma separated")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the prompt whose prefill is timed; 0 for none")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--split",
        type=int,
        default=executor.SPLIT,
        help="keys in a split of the first stretch, a divisor of 512 (default: %(default)s)",
    )
    parser.add_argument("--format", default="", help=f"of a shape's matrices: {', '.join([*Format, MIXED])}; bf16 if not given")
    parser.add_argument("--dequantise", action="store_true", help="convert quantised matrices to bf16 at load")
    parser.add_argument("--kv", choices=list(KV), default="bf16", help="type of keys and values (default: %(default)s)")
    parser.add_argument("--late", action="store_true", help="launch no kernel before its predecessor has ended")
    parser.add_argument("--profile", action="store_true", help="also print where a decode step's time goes, by kernel")
    options = parser.parse_args()
    executor.SPLIT = options.split
    if options.late:
        CudaForward.early = False
    print(measure.describe(), flush=True)
    cells = [tuple(map(int, cell.split("x"))) for cell in options.cells.split(",")]
    ctx = max([c for _, c in cells] + [options.prefill]) + 256
    model = load(options.model, options.format, options.dequantise, ctx)
    for sessions, length in cells:
        decode(model, sessions, length, options.steps, options.profile, KV[options.kv])
    if options.prefill:
        prefill(model, options.prefill, KV[options.kv])


def load(name: str, form: str, dequantise: bool, ctx: int) -> DenseModel:
    """A shape with random weights, its matrices in `form`, or a model file, on the card."""
    device = torch.device("cuda")
    source: WeightSource = RandomWeights(SHAPES[name], device, format=form) if name in SHAPES else open_weights(name)
    keep = frozenset[Format]() if dequantise else quantised_formats(device)
    model = DenseModel(source, device, torch.bfloat16, ctx, keep=keep)
    print(f"{source.config.name}: {model.bytes / 1e9:.2f} GB of weights", flush=True)
    return model


def make(model: DenseModel, sessions: int, ctx: int, kv: torch.dtype) -> Engine:
    """An engine with room for `sessions` of `ctx` tokens."""
    config = model.config
    shape = PageShape(config.layers, config.kv_heads, PAGE, config.head_dim, kv)
    pool = PagePool(shape, sessions * -(-ctx // PAGE), model.device)
    return assemble(model, pool, sessions, ctx, CHUNK + sessions)


def decode(model: DenseModel, sessions: int, length: int, steps: int, profiled: bool, kv: torch.dtype) -> None:
    """One cell: the time of the captured step, which holds everything from the embedding to the logits."""
    config = model.config
    engine = make(model, sessions, length + steps + 40, kv)
    rnd = random.Random(length)
    prompts = [[rnd.randrange(config.vocab) for _ in range(length)] for _ in range(sessions)]
    for slot, prompt in enumerate(prompts):
        for at in range(0, length, CHUNK):
            engine.launch([Work(slot, prompt[at : at + CHUNK], True)])
    rows = [Work(slot, [slot + 7], True) for slot in range(sessions)]
    for _ in range(3):
        engine.launch(rows)
    together = engine.logits(0).clone()
    engine.truncate(0, length)
    for _ in range(3):
        engine.launch(rows[:1])
    assert torch.equal(engine.logits(0), together), "a row in company differs from the row alone"
    for slot in range(1, sessions):
        engine.truncate(slot, length + 3)
    forward = engine.forward
    assert isinstance(forward, CudaForward)
    graph = forward.graph(sessions)
    times = [measure.once(graph.replay) for _ in range(steps)]
    step = sorted(times)[len(times) // 2]
    keys = 2 * config.layers * config.kv_heads * config.head_dim * kv.itemsize * (length + 3)
    weights = model.bytes - (0 if model.head.holds(model.embed) else model.embed.nbytes)
    floor = (weights + sessions * keys) / measure.read_bandwidth()
    print(f"decode {sessions:3} x {length:5}: {step * 1e3:7.3f} ms, floor {floor * 1e3:7.3f}, {step / floor:5.2f} x floor, "
          f"{sessions / step:7.0f} tok/s", flush=True)  # fmt: skip
    if not model.quantised:
        theirs = TorchStep(model, sessions, length + 2)
        taken = sorted(measure.once(theirs.graph.replay) for _ in range(steps))[steps // 2]
        print(
            f"    torch's products and attention in a graph: {taken * 1e3:7.3f} ms, ours is {step / taken:5.2f} of it", flush=True
        )
    if profiled:
        profile(graph.replay)


def profile(run: Callable[[], object]) -> None:
    """Print the kernels of one run that take longest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    for event in rows[:12]:
        total, each = event.self_device_time_total / 5e3, event.self_device_time_total / event.count
        print(f"    {total:7.3f} ms  {event.count // 5:4} x {each:7.2f} us  {event.key[:60]}", flush=True)


def prefill(model: DenseModel, length: int, kv: torch.dtype) -> None:
    """A cold prompt in chunks, against the same products through cuBLAS and torch's flash attention."""
    config = model.config
    engine = make(model, 1, length + 16, kv)
    rnd = random.Random(1)
    prompt = [rnd.randrange(config.vocab) for _ in range(length)]

    def ours() -> None:
        engine.truncate(0, 0)
        for at in range(0, length, CHUNK):
            engine.launch([Work(0, prompt[at : at + CHUNK], at + CHUNK >= length)])

    x = torch.randn(length, config.hidden, device="cuda").bfloat16()
    wide = torch.randn(length, config.ffn, device="cuda").bfloat16()
    q = torch.randn(1, config.heads, length, config.head_dim, device="cuda").bfloat16()
    k, v = (torch.randn(1, config.kv_heads, length, config.head_dim, device="cuda").bfloat16() for _ in range(2))
    qkv, out, gate_up, down = (product.weight for product in model.linears)  # of one layer: too large for a cache to keep

    def theirs() -> None:
        for _ in model.layers:
            torch.mm(x, qkv.t())
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.mm(x[:, : out.shape[1]], out.t())
            torch.mm(x, gate_up.t())
            torch.mm(wide, down.t())

    mine, peers = _timed(ours), _timed(theirs)
    print(f"prefill {length}: {mine * 1e3:.1f} ms ({length / mine:.0f} tok/s), cuBLAS and flash {peers * 1e3:.1f} ms, "
          f"{mine / peers:.2f} x", flush=True)  # fmt: skip


def _timed(run: Callable[[], None]) -> float:
    run()
    return min(measure.once(run) for _ in range(3))


if __name__ == "__main__":
    main()
