"""A Linear through the kernels is the Linear of plain torch: one format or several, with biases, added, gated, as a tied head."""

from __future__ import annotations

import pytest
import torch

from ds4batch.engine.linear import Linear
from ds4batch.engine.linear_cuda import ADD, SILU_MUL, STORE, Scratch, multiply, quantised_formats
from ds4batch.engine.models.dense import DenseModel
from tests.engine.test_quantised_weights import ALL, TINY, RandomWeights, replace
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
    assert_near(multiply(x, qkv, out, scratch=Scratch(DEVICE, 1 << 16, 64)), qkv(x))


def test_a_product_is_added_to_the_residual_stream(mixed: DenseModel) -> None:
    down = mixed.layers[0].down
    x, hidden = x_of(3, down.shape[1]), torch.randn(3, down.shape[0], device=DEVICE)
    assert_near(multiply(x, down, hidden.clone(), epilogue=ADD), hidden + down(x))


@pytest.mark.parametrize("parts", [("gate", "gate"), ("gate", "down")])
def test_gate_and_up_of_one_or_two_formats(mixed: DenseModel, parts: tuple[str, str]) -> None:
    source = RandomWeights(replace(SMALL, hidden=256, ffn=256), DEVICE, dtype=DTYPE, format="Q4_K_M")
    from ds4batch.engine.weights.raw import pack

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
