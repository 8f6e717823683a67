"""What kernel benchmarks share: the card's two ceilings, measured, and the time of a launch without its overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch


def once(run: Callable[[], object]) -> float:
    """Seconds on the device from before `run` to behind the last thing it launched."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def seconds(launches: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Seconds of one launch: the median over `repeats` replays of a graph that holds all of them once.

    Give launches over different data whose sizes add up to more than the L2, or the cache is measured.
    """
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    return sorted(once(graph.replay) for _ in range(repeats))[repeats // 2] / len(launches)


@lru_cache
def read_bandwidth() -> float:
    """Bytes per second of a large read: the sum of 4 GiB."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return data.nbytes / seconds([lambda: torch.sum(data)] * 3)


@lru_cache
def matrix_rate() -> float:
    """FLOP per second of an 8192 x 8192 x 8192 bf16 product of random values through torch."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / seconds([lambda: torch.mm(a, b)] * 5)


def copies(make: Callable[[], torch.Tensor], size: int, total: int = 400 << 20) -> list[torch.Tensor]:
    """As many tensors as it takes to outgrow the cache."""
    return [make() for _ in range(max(2, min(24, -(-total // size))))]


def describe() -> str:
    """Card, versions and ceilings, for the head of a table."""
    import triton

    name = torch.cuda.get_device_name()
    return (f"{name}, torch {torch.__version__}, triton {triton.__version__}, "
            f"read {read_bandwidth() / 1e12:.2f} TB/s, bf16 {matrix_rate() / 1e12:.0f} TFLOP/s")  # fmt: skip
