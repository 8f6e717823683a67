"""Before any test module is imported: without a card, kernels run in Triton's interpreter, which is chosen when they are imported. And
SIGINT interrupts, also where a shell ignores it for what runs in its background: tests send it, and so would wait for ever."""

from __future__ import annotations

import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
