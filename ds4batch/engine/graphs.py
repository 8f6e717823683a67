"""CUDA graphs: launches that are kept and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run once, which compiles what is new, then keep the launches as a graph, with what `run` returned when they were kept.

    All memory that the kernels name must outlive the graph.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found
