"""The sampler's kernels: the tokens of the CPU sampler for every knob, and each row's token its own."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

import triton_kernels.sampling as module
from ds4batch.engine import philox
from ds4batch.engine.sampler import Draw, draw
from ds4batch.messages import Sampling
from tests.kernels.compiling import Variant, compile_for_hopper
from triton_kernels.sampling import Needs, Request, argmax, pack, philox_uniform, sample, sample_reference, workspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALL = Needs(True, True, True)
ON_CARD = DEVICE.type == "cuda"  # the interpreter takes milliseconds a program
TOP_K = (0, 1, 20, 100_000) if ON_CARD else (0, 20)
KNOBS = [Request(*knobs) for knobs in itertools.product((0.3, 1.7), TOP_K, (1.0, 0.9, 0.3, 0.0), (0.0, 0.05))]


def rows_of(count: int, vocab: int, key: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(key + vocab)) * scale


def tokens(logits: torch.Tensor, requests: Sequence[Request], needs: Needs | None = None) -> list[int]:
    """Through the kernels, in one batch."""
    knobs, needed = pack(requests)
    out = torch.full((len(requests),), -1, dtype=torch.int64, device=DEVICE)
    space = workspace(len(requests), logits.shape[1], DEVICE)
    device_logits = logits.to(DEVICE)
    assert module.supported(device_logits, out, space) == ""
    sample(device_logits, knobs.to(DEVICE), needs or needed, out, space)
    assert not space.arrived.any(), "a counter is left over for the next launch"
    assert not space.sums.any()
    found: list[int] = out.tolist()
    return found


def cpu_token(logits: torch.Tensor, request: Request) -> int:
    temperature, top_k, top_p, min_p, seed, position = request
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    return draw(logits.numpy(), Draw(sampling, [0], ()), position).token


def cpu_tokens(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    return [cpu_token(row, request) for row, request in zip(logits, requests, strict=True)]


def test_every_combination_of_knobs_draws_the_cpu_samplers_tokens() -> None:
    source = random.Random(1)
    kinds = [*KNOBS, Request(1.0, 1), Request(1.0, 1000, 0.9), Request(1.0, 100_000, 0.9, 0.05), Request(1.0, 999, min_p=2.0)]
    requests = [r._replace(seed=source.getrandbits(64), position=source.randrange(2**40)) for r in kinds]
    logits = rows_of(len(requests), 1000)
    assert tokens(logits, requests) == cpu_tokens(logits, requests)
    assert [sample_reference(row, r) for row, r in zip(logits, requests, strict=True)] == cpu_tokens(logits, requests)


def test_larger_vocabularies_draw_the_cpu_samplers_tokens() -> None:
    requests = [
        Request(),
        Request(1.0, seed=3),
        Request(0.8, 50, 0.95, 0.01, 5, 9),
        Request(1.2, 0, 0.99, seed=7),
        Request(1.0, 300),
    ]
    logits = rows_of(len(requests), 5000, scale=2.0)
    assert tokens(logits, requests) == cpu_tokens(logits, requests)


def test_none_of_500_draws_differs_from_the_cpu_samplers() -> None:
    requests = [Request(1.0, seed=11, position=position) for position in range(500)]
    logits = rows_of(1, 1000).expand(500, -1)
    assert tokens(logits, requests) == cpu_tokens(logits, requests)


def test_ties_are_cut_at_the_lowest_ids() -> None:
    logits = (rows_of(8, 1000, scale=2.0)).round()  # about ten distinct values
    knobs = [(3, 1.0), (40, 1.0), (0, 0.4), (0, 0.9), (200, 0.7), (1, 0.5), (7, 0.0), (999, 0.999)]
    requests = [Request(1.0, top_k, top_p, seed=i, position=5) for i, (top_k, top_p) in enumerate(knobs)]
    for position in range(40 if ON_CARD else 2):
        placed = [r._replace(position=position) for r in requests]
        assert tokens(logits, placed) == cpu_tokens(logits, placed)


def test_greedy_takes_the_highest_and_ties_go_to_the_lowest_id() -> None:
    logits = rows_of(5, 5000)
    logits[0, [4999, 2048, 2047]] = 50.0
    logits[1] = -float("inf")
    logits[1, 77] = -1e30
    logits[2] = torch.where(torch.arange(5000) % 2 == 1, 0.0, -0.0)
    logits[3] = -float("inf")
    logits[4, 4999] = float("inf")
    space, out = workspace(5, 5000, DEVICE), torch.empty(5, dtype=torch.int64, device=DEVICE)
    assert argmax(logits.to(DEVICE), out, space).tolist() == [2047, 77, 0, 0, 4999]
    assert tokens(logits, [Request(0.0, 5, 0.5, 0.1)] * 5, ALL) == [2047, 77, 0, 0, 4999]


def test_extreme_rows_draw_the_cpu_samplers_tokens() -> None:
    logits = rows_of(6, 1000)
    logits[0] = 1.25  # all alike
    logits[1, 1:] = -float("inf")  # one token left
    logits[2] *= 1e4  # one token outweighs all
    logits[3, ::2] = -float("inf")
    logits[4] = logits[4] * 1e-3 - 1e4
    kinds = [Request(1, 10, 0.55), Request(1, 9, 0.9), Request(2, 0, 0.9), Request(1), Request(1, 0, 0.2), Request(1e-9, 4)]
    requests = [r._replace(seed=i) for i, r in enumerate(kinds)]
    assert tokens(logits, requests) == cpu_tokens(logits, requests)


def test_a_rows_token_does_not_depend_on_company_order_or_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(2)
    kinds = [Request(), Request(1.5), Request(1.5, 30), Request(1.5, 0, 0.9), Request(1.5, 500, 0.8, 0.001)]
    most = 17 if ON_CARD else 8
    requests = [kinds[i % 5]._replace(seed=source.getrandbits(64), position=i) for i in range(most)]
    logits = rows_of(most, 700, scale=1.0)
    alone = [tokens(logits[i : i + 1], requests[i : i + 1])[0] for i in range(most)]
    assert alone == cpu_tokens(logits, requests)
    for count in range(2, most + 1) if ON_CARD else (2, most):
        assert tokens(logits[:count], requests[:count]) == alone[:count]
    assert tokens(logits.flip(0), requests[::-1]) == alone[::-1]
    assert tokens(logits[:2], requests[:2], ALL) == alone[:2]
    monkeypatch.setattr(module, "_BLOCK", 256)
    assert tokens(logits, requests) == alone, "the blocks enter no result"


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_rows_that_are_not_finite_disturb_nobody_and_stay_in_the_vocabulary() -> None:
    requests = [Request(1.0, 20, 0.9, 0.01, seed=i) for i in range(5)]
    logits = rows_of(5, 300)
    expected = tokens(logits, requests)
    logits[1], logits[2, 5], logits[4] = float("nan"), float("inf"), -float("inf")
    found = tokens(logits, requests)
    assert [found[i] for i in (0, 3)] == [expected[i] for i in (0, 3)]
    assert all(0 <= token < 300 for token in found)


def test_rows_may_lie_apart() -> None:
    wide = torch.full((4, 640), 99.0)
    wide[:, :600] = rows_of(4, 600)
    requests = [Request(1.0, 20, 0.9, seed=i) for i in range(4)]
    assert tokens(wide.to(DEVICE)[:, :600].cpu(), requests) == cpu_tokens(wide[:, :600].contiguous(), requests)
    space, out = workspace(4, 600, DEVICE), torch.empty(4, dtype=torch.int64, device=DEVICE)
    knobs, needs = pack(requests)
    sample(wide.to(DEVICE)[:, :600], knobs.to(DEVICE), needs, out, space)
    assert out.tolist() == cpu_tokens(wide[:, :600].contiguous(), requests)


def test_only_the_launches_a_batch_needs_are_asked_for() -> None:
    assert pack([])[1] == Needs(False, False, False)
    assert pack([Request(0.0, 5, 0.5)])[1] == Needs(False, False, False)
    assert pack([Request(), Request(1.0)])[1] == Needs(True, False, False)
    assert pack([Request(1.0, 4), Request(1.0, 0, 0.9)])[1] == ALL
    assert pack([Request(1.0, seed=-1)])[0].shape == (1, 6)


def test_unfit_tensors_are_refused() -> None:
    logits, out, space = torch.zeros(2, 300), torch.zeros(2, dtype=torch.int64), workspace(2, 300, torch.device("cpu"))
    assert module.supported(logits, out, space) == ""
    assert "fp32" in module.supported(logits.half(), out, space)
    assert "contiguous" in module.supported(torch.zeros(300, 2).t(), out, space)
    assert "workspace" in module.supported(torch.zeros(2, 3000), out, space)
    assert "vocabulary" in module.supported(torch.empty(2, (1 << 20) + 1), out, space)


@triton.jit
def _aims(seeds, positions, total, out):  # type: ignore[no-untyped-def]
    """The numerators of u * total, one a program."""
    i = tl.program_id(0)
    tl.store(out + i, module._aim(tl.load(seeds + i), tl.load(positions + i), tl.load(total)))


def test_philox_gives_the_published_words() -> None:
    pi = 0x299F31D0A4093822  # the known-answer vectors of Random123 that have a counter of 64 bits
    cases = [(0, 0), (2**64 - 1, 1), (pi, 0x85A308D3243F6A88), (5, 2**33 + 7), (2**63, 2**32 - 1)]
    signed = [[x - 2**64 if x >= 2**63 else x for x in column] for column in zip(*cases, strict=True)]
    seeds, positions = (torch.tensor(column, device=DEVICE) for column in signed)
    out = torch.zeros(len(cases), dtype=torch.int64, device=DEVICE)
    _aims[(len(cases),)](seeds, positions, torch.tensor([2**53], device=DEVICE), out)
    assert out.tolist() == [int(philox.uniform(seed, position) * 2**53) for seed, position in cases]
    assert out[0].item() == (0xE169C58D << 32 | 0x6627E8D5) >> 11
    assert [philox_uniform(*case) for case in cases] == [philox.uniform(*case) for case in cases]


def test_every_kernel_compiles_for_hopper_without_spills() -> None:
    wide = dict.fromkeys(("knobs", "out", "best", "target", "sums", "weight"), "*i64")
    narrow = dict.fromkeys(("threshold", "arrived", "above", "ties"), "*i32")
    kinds = {"logits": "*fp32", "stride": "i32", "V": "i32", "peak": "*fp32", **wide, **narrow}

    def variant(kernel: str, absent: tuple[str, ...] = (), **constants: object) -> Variant:
        names = [name for name in getattr(module, kernel).arg_names if name in kinds and name not in absent]
        constants |= dict.fromkeys(absent) | {"BLOCK": module._BLOCK}
        return Variant("triton_kernels.sampling", kernel, {name: kinds[name] for name in names}, constants, module._WARPS)

    variants = [variant("_highest", ("knobs",), SAMPLED=False, WIDE=128), variant("_highest", SAMPLED=True, WIDE=32)]
    variants += [variant("_search", WEIGHED=weighed, SHIFT=shift) for weighed in (False, True) for shift in (28, 24, 0)]
    variants += [variant("_tally", DRAW=drawn, WIDE=128) for drawn in (False, True)]
    built = compile_for_hopper(variants)
    assert len(built) == len(variants)
    assert all(result.stack_bytes == 0 for result in built), built
