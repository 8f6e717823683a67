"""Before any test module is imported: without a card, kernels run in Triton's interpreter, which is chosen when they are imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
