"""Loading: one tensor at a time, in the file's order, with a bar that counts its bytes; and random weights instead of a file's."""

from __future__ import annotations

import gc
import io
import json
import shutil
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.shapes import QWEN3_8B, RandomWeights, hf_config, write_directory
from ds4batch.engine.build import build
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.progress import LoadProgress
from ds4batch.engine.weights import staging
from ds4batch.engine.weights.config import ModelError, Rope
from ds4batch.engine.weights.dummy import open_dummy
from ds4batch.engine.weights.hf_config import config_from_hf
from ds4batch.engine.weights.layout import Extent
from ds4batch.engine.weights.raw import Raw
from ds4batch.engine.weights.source import open_weights
from ds4batch.settings import Settings
from scheduler.backend import Work
from tests.engine.models import NATIVE, TINY
from triton_kernels.quant_formats import Format

CPU = torch.device("cpu")
SMALL = replace(TINY, hidden=256, heads=4, head_dim=64, ffn=512, tied=False)


class Counted(RandomWeights):
    """Random weights that know which of the tensors they gave out are still alive."""

    def __init__(self, format: str) -> None:
        super().__init__(SMALL, CPU, format=format)
        self.order: list[str] = []
        self.most = 0
        self._given: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def raw(self, name: str, device: torch.device) -> Raw:
        raw = super().raw(name, device)
        self._note(name, raw.data)
        return raw

    def load(self, name: str) -> torch.Tensor:
        tensor = super().load(name)
        self._note(name, tensor)
        return tensor

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 2:  # what is small is kept as it is
            alive = sum(size for given, size in self._given if given() is not None)
            self.most = max(self.most, alive + tensor.nbytes)
            self._given.append((weakref.ref(tensor), tensor.nbytes))
        if not self.order or self.order[-1] != name:
            self.order.append(name)


def test_converted_weights_are_held_one_tensor_at_a_time() -> None:
    source = Counted(Format.Q8_0)  # converted from fp32 values, which the host makes
    largest = max(4 * torch.Size(source.shape(name)).numel() for name in source.names())
    model = DenseModel(source, CPU, torch.bfloat16, 256)
    assert source.most <= largest
    assert sorted(source.order) == sorted(source.names())
    gc.collect()
    assert model.bytes > 0
    assert not any(given() is not None for given, _ in source._given)


def test_kept_weights_are_held_one_product_at_a_time() -> None:
    source = Counted(Format.Q4_0)
    model = DenseModel(source, CPU, torch.bfloat16, 256, keep=frozenset(Format))
    largest = max(source.extent(name).nbytes for name in source.names())
    assert source.most <= 2 * largest  # gate and up, or the embedding as a table's source
    assert model.quantised
    assert not any(given() is not None for given, _ in source._given)


def test_tensors_are_read_in_the_order_of_the_forward() -> None:
    source = Counted("")
    names: list[str] = []
    DenseModel(source, CPU, torch.bfloat16, 256, names.append)
    assert names == source.order
    layers = [name.split(".")[1] for name in names if name.startswith("layers.")]
    assert layers == sorted(layers)
    assert (names[0], names[-1]) == ("embed.weight", "head.weight")


def test_a_gguf_tensor_takes_its_own_bytes_and_a_bounded_piece_of_host_memory(demo_path: str) -> None:
    source = open_weights(demo_path)
    tracemalloc.start()
    try:
        raw = source.raw("embed.weight", CPU)
        _, peak = tracemalloc.get_traced_memory()  # numpy and Python; the tensor itself is torch's
    finally:
        tracemalloc.stop()
    assert raw.data.nbytes == source.extent("embed.weight").nbytes
    assert peak < 1 << 20


def test_a_file_that_shrank_is_reported_by_tensor_and_byte(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"12345678")
    assert bytes(staging.Staging(CPU).read(str(file), "t", 2, 4).numpy()) == b"3456"
    with pytest.raises(ModelError, match="tensor t ends at byte 8, 2 bytes short"):
        staging.Staging(CPU).read(str(file), "t", 6, 4)
    with pytest.raises(ModelError, match="cannot read tensor t"):
        staging.Staging(CPU).read(str(tmp_path / "gone"), "t", 0, 4)


def test_progress_names_each_file_and_its_bytes() -> None:
    out = io.StringIO()
    parts = [Extent("/m/a.safetensors", 1 << 20), Extent("/m/a.safetensors", 2 << 20), Extent("/m/b.safetensors", 4 << 20)]
    with LoadProgress("tiny", parts, out) as progress:
        for part in parts:
            progress.advance(part)
    assert out.getvalue().splitlines() == [
        "loading a.safetensors: 3.0 MiB",
        "loading b.safetensors: 4.0 MiB",
        "loaded tiny: 7.0 MiB",
    ]


def test_progress_on_a_terminal_is_a_bar_a_file() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    parts = [Extent("/m/a.gguf", 1 << 20), Extent("/m/b.gguf", 1 << 20)]
    with LoadProgress("tiny", parts, out) as progress:
        for part in parts:
            progress.advance(part)
    assert "loading a.gguf" in out.getvalue()
    assert "loading b.gguf" in out.getvalue()


def test_a_failed_load_says_nothing_of_success() -> None:
    out = io.StringIO()
    with pytest.raises(ModelError), LoadProgress("tiny", [Extent("a", 1)], out):
        raise ModelError("broken")
    assert "loaded" not in out.getvalue()


@pytest.mark.parametrize("fp8", [False, True])
def test_a_directory_without_weights_starts_on_random_ones(tmp_path: Path, demo_path: str, fp8: bool) -> None:
    shape = replace(QWEN3_8B, layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=50000, context=512)
    write_directory(shape, tmp_path / "m", demo_path, fp8)
    settings = Settings(model=str(tmp_path / "m"), load_format="dummy", batched_session=2, ctx=256, device="cpu")
    built = build(settings, NATIVE)
    assert built.parameters == RandomWeights(shape, CPU).parameters
    assert built.need.weights == built.engine.model.bytes
    engine, tokens = built.engine, [1, 2, 3]
    for _ in range(4):
        engine.launch([Work(0, tokens[len(engine.tokens(0)) :], True)])
        tokens.append(int(engine.logits(0).argmax()))
    assert engine.tokens(0) == tokens[:-1]
    again = build(settings, NATIVE).engine
    again.launch([Work(1, tokens[:3], True)])
    assert int(again.logits(1).argmax()) == tokens[3]
    with pytest.raises(ModelError, match=r"neither model.safetensors nor"):
        build(replace(settings, load_format="auto"))


def test_the_written_directory_says_what_the_shape_is(tmp_path: Path, demo_path: str) -> None:
    from ds4batch.tokenizer import load_tokenizer

    write_directory(QWEN3_8B, tmp_path, demo_path)
    table = json.loads((tmp_path / "config.json").read_text())
    assert config_from_hf(table, "config.json", QWEN3_8B.name, 1000) == QWEN3_8B
    ours, theirs = load_tokenizer(str(tmp_path)), load_tokenizer(demo_path)
    assert ours.encode("Hello, world <|im_end|>") == theirs.encode("Hello, world <|im_end|>")
    assert (ours.chat_template, ours.bos_id, ours.eos_id, ours.add_bos) == (
        theirs.chat_template, theirs.bos_id, theirs.eos_id, theirs.add_bos,
    )  # fmt: skip
    assert ours.stop_ids == theirs.stop_ids
    with pytest.raises(ValueError, match="scaled rope"):
        write_directory(replace(QWEN3_8B, rope=Rope(1e4, "linear", 2.0)), tmp_path, demo_path)


def test_random_weights_of_a_directory_are_fp8_where_its_configuration_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(SMALL, fp8=True)))
    source = open_dummy(str(tmp_path), CPU, torch.bfloat16)
    assert source.stored_type("layers.0.q.weight") == "F8_E4M3"
    assert source.stored_type("head.weight") == "BF16"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="model_type is None"):
        open_dummy(str(tmp_path), CPU, torch.bfloat16)


def test_a_gguf_can_lend_its_shape_to_random_weights(tmp_path: Path, demo_path: str) -> None:
    copy = tmp_path / "m.gguf"
    shutil.copy(demo_path, copy)
    source = open_dummy(str(copy), CPU, torch.bfloat16)
    assert source.config == open_weights(str(copy)).config
    assert source.stored_type("layers.0.q.weight") == "BF16"
