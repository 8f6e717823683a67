"""A Linear through the kernels is the Linear of plain torch: one format or several, biases, added, gated, many rows, a tied head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.shapes import RandomWeights
from ds4batch.engine import linear_cuda
from ds4batch.engine.linear import Linear
from ds4batch.engine.linear_cuda import ADD, SILU_MUL, STORE, Scratch, multiply, quantised_formats
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.weights.raw import pack
from tests.engine.test_quantised_weights import ALL, TINY
from triton_kernels.linear import linear
from triton_kernels.linear_quant import chains
from triton_kernels.quant_formats import Format

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter's bf16 products are wrong
TOLERANCE = 2e-2 if DEVICE.type == "cuda" else 1e-5
SMALL = replace(TINY, layers=8, ffn=256, qkv_bias=True, family="qwen2")


def model_of(fmt: str, tied: bool = False) -> DenseModel:
    return DenseModel(RandomWeights(replace(SMALL, tied=tied), DEVICE, dtype=DTYPE, format=fmt), DEVICE, DTYPE, 256, keep=ALL)


def x_of(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(DEVICE, DTYPE)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.float() - expected.float()).norm() <= TOLERANCE * expected.float().norm()


@pytest.fixture(scope="module")
def mixed() -> DenseModel:
    return model_of("Q4_K_M")


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("which", [0, 1])
def test_q_k_and_v_of_one_or_two_formats_with_biases(mixed: DenseModel, rows: int, which: int) -> None:
    qkv = mixed.layers[which].qkv
    assert len(qkv.quantised) == (2, 1)[which]
    assert qkv.bias is not None
    x = x_of(rows, qkv.shape[1])
    out = torch.full((rows, qkv.shape[0]), float("nan"), dtype=DTYPE, device=DEVICE)
    assert_near(multiply(x, qkv, out), qkv(x))


def whole(rows: int, width: int) -> torch.Tensor:
    """Values whose sums round nowhere under the interpreter, where the order of sums is numpy's."""
    return x_of(rows, width) if DEVICE.type == "cuda" else torch.zeros(rows, width).index_fill_(1, torch.tensor([3]), 0.5)


@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU_MUL])
@pytest.mark.parametrize("formats", [("gate",), ("gate", "down")])
def test_many_rows_have_the_bits_of_few_and_of_the_converted_weight(
    monkeypatch: pytest.MonkeyPatch, epilogue: int, formats: tuple[str, ...]
) -> None:
    source = RandomWeights(replace(SMALL, hidden=256, ffn=256), DEVICE, dtype=DTYPE, format="Q4_K_M")
    weights = [pack([source.raw(f"layers.0.{name}.weight", DEVICE)]) for name in formats]
    kept = Linear.of_quantised(weights, DTYPE, torch.randn(256 * len(weights), dtype=DTYPE, device=DEVICE))
    x = whole(5, 256)
    shape = (5, kept.shape[0] // 2 if epilogue == SILU_MUL else kept.shape[0])
    start = torch.randn(shape, device=DEVICE)
    few = multiply(x, kept, start.clone(), epilogue=epilogue)
    plain = linear(x, kept.weight, start.clone(), bias=kept.bias, epilogue=epilogue, chains=chains(*kept.shape))
    monkeypatch.setattr(linear_cuda, "EXPAND_ROWS", 2)
    scratch = Scratch([kept])
    scratch.values.fill_(float("nan"))
    many = multiply(x, kept, start.clone(), epilogue=epilogue, scratch=scratch)
    assert torch.isfinite(scratch.values).all()  # the values were written out
    assert torch.equal(many, plain)
    assert torch.equal(few, plain)


@pytest.mark.parametrize("names", [("k",), ("k", "v")])
def test_parts_take_the_chains_of_the_whole_weight(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    source = RandomWeights(replace(SMALL, hidden=2048), DEVICE, dtype=DTYPE, format="Q4_K_M")
    weights = [pack([source.raw(f"layers.0.{name}.weight", DEVICE)]) for name in names]
    assert len({weight.format for weight in weights}) == len(names)
    kept = Linear.of_quantised(weights, DTYPE)
    assert chains(*kept.shape) == 2
    x = whole(3, 2048)
    scratch = Scratch([kept])
    plain = linear(x, kept.weight, torch.empty(3, kept.shape[0], device=DEVICE), chains=2)
    scratch.sums.partial.fill_(float("nan"))
    assert torch.equal(multiply(x, kept, torch.empty_like(plain), scratch=scratch), plain)
    assert torch.isfinite(scratch.sums.partial).sum() >= 2 * 3 * weights[0].n  # each chain's sums
    assert not scratch.sums.arrived.any()
    monkeypatch.setattr(linear_cuda, "EXPAND_ROWS", 2)
    assert torch.equal(multiply(x, kept, torch.empty_like(plain), scratch=scratch), plain)


def test_a_weight_that_does_not_fit_into_the_scratch_is_multiplied_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = model_of(Format.Q8_0).layers[0]
    monkeypatch.setattr(linear_cuda, "EXPAND_ROWS", 2)
    scratch = Scratch([layer.out])
    x = x_of(3, layer.qkv.shape[1])
    scratch.values.fill_(0.5)
    out = torch.empty(3, layer.qkv.shape[0], dtype=DTYPE, device=DEVICE)
    assert_near(multiply(x, layer.qkv, out, scratch=scratch), layer.qkv(x))
    assert (scratch.values == 0.5).all()


def test_a_product_is_added_to_the_residual_stream(mixed: DenseModel) -> None:
    down = mixed.layers[0].down
    x, hidden = x_of(3, down.shape[1]), torch.randn(3, down.shape[0], device=DEVICE)
    assert_near(multiply(x, down, hidden.clone(), epilogue=ADD), hidden + down(x))


@pytest.mark.parametrize("parts", [("gate", "gate"), ("gate", "down")])
def test_gate_and_up_of_one_or_two_formats(mixed: DenseModel, parts: tuple[str, str]) -> None:
    source = RandomWeights(replace(SMALL, hidden=256, ffn=256), DEVICE, dtype=DTYPE, format="Q4_K_M")
    weights = [pack([source.raw(f"layers.0.{name}.weight", DEVICE)]) for name in parts]
    formats = {weight.format for weight in weights}
    assert len(formats) == len(set(parts))
    if len(formats) == 1:
        raw = source.raw("layers.0.gate.weight", DEVICE)
        weights = [pack([raw, raw])]
    gate_up = Linear.of_quantised(weights, DTYPE)
    x = x_of(3, 256)
    gate, up = gate_up(x).chunk(2, dim=-1)
    out = torch.full((3, 256), float("nan"), dtype=DTYPE, device=DEVICE)
    assert_near(multiply(x, gate_up, out, epilogue=SILU_MUL), torch.nn.functional.silu(gate.float()) * up.float())


@pytest.mark.parametrize("fmt", [Format.Q8_0, Format.FP8])
def test_a_head_gives_fp32_logits(fmt: Format) -> None:
    head = model_of(fmt, tied=True).head
    assert bool(head.quantised) == (fmt != Format.FP8)  # the embeddings of FP8 models are not FP8
    x = x_of(2, head.shape[1])
    out = torch.empty(2, head.shape[0], device=DEVICE)
    assert_near(multiply(x, head, out, epilogue=STORE), x.float() @ head.weight.float().t())


def test_no_format_is_kept_where_no_kernel_runs() -> None:
    assert quantised_formats(torch.device("cpu")) == frozenset()
