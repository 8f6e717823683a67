"""Which drafter a server gets, and where the weights of an MTP module are.

Looked for in this order: --mtp-head; beside the model, NAME.mtp.safetensors for NAME.gguf or mtp.safetensors in a directory; among
the modules that ship with this package, by the model's name and shape. Random weights have a random one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ds4batch.engine.draft.drafter import Drafter
from ds4batch.engine.draft.lookup import LookupDrafter
from ds4batch.engine.draft.mtp import MtpDrafter
from ds4batch.engine.draft.mtp_head import MtpWeights, shapes
from ds4batch.engine.draft.mtp_window import MOST_ROWS, RING
from ds4batch.engine.memory import Extra
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.model import Model
from ds4batch.engine.weights.config import ModelConfig, ModelError
from ds4batch.settings import Settings

SHIPPED = Path(__file__).with_name("heads")


def head_of(settings: Settings, config: ModelConfig) -> Path | None:
    """The file of the module's weights; None where nothing drafts so, or where they are random.

    Raises ModelError where there is none. Asked before the model is loaded.
    """
    if settings.drafter != "mtp" or settings.load_format == "dummy":
        return None
    if settings.mtp_head:
        if not Path(settings.mtp_head).is_file():
            raise ModelError(f"--mtp-head {settings.mtp_head}: no such file")
        return Path(settings.mtp_head)
    for path in _places(Path(settings.model)):
        if path.is_file():
            return path
    for path in sorted(SHIPPED.glob("*.safetensors")):
        if _fits(path, config):
            return path
    raise ModelError(f"--draft mtp: this model ships no MTP head ({config.name}); --mtp-head names one")


def drafter_of(settings: Settings, model: Model, slots: int, head: Path | None) -> Drafter | None:
    """The drafter for so many sessions, None where nothing drafts. Raises ModelError for a head that does not fit the model."""
    if settings.drafter == "none":
        return None
    if settings.drafter == "lookup":
        return LookupDrafter(slots)
    if not isinstance(model, DenseModel):
        raise ModelError(f"--draft mtp: models of the family {model.config.family} have no MTP heads here")
    try:
        weights = random_head(model.config) if head is None else MtpWeights.load(head, model.config, torch.device("cpu"))
    except (ValueError, OSError) as error:
        raise ModelError(f"--draft mtp: {error}") from None
    from ds4batch.engine.models import dense_cuda

    if dense_cuda.supported(model.config, model.device, model.dtype):
        return MtpDrafter(model, weights, slots)
    from ds4batch.engine.draft.mtp_cuda import CudaMtpDrafter

    return CudaMtpDrafter(model, weights, slots, settings.drafts)


def draft_need(settings: Settings, config: ModelConfig, dtype: torch.dtype) -> tuple[int, Extra]:
    """Bytes of the drafter's weights, and what it takes beside. Nothing for a lookup, which the host's memory holds."""
    if settings.drafter != "mtp":
        return 0, Extra()
    size, kv = dtype.itemsize, 2 * config.kv_heads * config.head_dim
    weights = size * (
        sum(map(math.prod, shapes(config).values())) + 2 * config.hidden**2
    )  # a card holds the projection in halves too
    row = 12 * config.hidden + size * (3 * config.hidden + 2 * config.heads * config.head_dim + kv)
    return weights, Extra(
        session=RING * (4 * config.hidden + size * kv), session_scratch=4 * config.vocab, scratch=MOST_ROWS * row
    )


def random_head(config: ModelConfig, seed: int = 0) -> MtpWeights:
    """A module of the model's shape that knows nothing: its drafts cost what others cost. bf16 on the host."""
    generator = torch.Generator().manual_seed(seed)
    stored = shapes(config)

    def tensor(name: str) -> torch.Tensor:
        shape = stored[f"mtp.{name}.weight"]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (torch.randn(shape, generator=generator) / math.sqrt(shape[1])).bfloat16()

    return MtpWeights(**{field.name: tensor(field.name) for field in dataclasses.fields(MtpWeights)})


def _places(model: Path) -> Iterator[Path]:
    """Where a head lies beside the model."""
    yield model / "mtp.safetensors" if model.is_dir() else model.with_suffix(".mtp.safetensors")


def _fits(path: Path, config: ModelConfig) -> bool:
    """Whether the head was made for a model of this name and shape."""
    try:
        with safe_open(path, framework="pt") as file:
            made_for = (file.metadata() or {}).get("model")
            names = set(file.keys())
            found = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError):
        return False
    return made_for == config.name and found == shapes(config)
