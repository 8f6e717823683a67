"""One door to a model's tokenizer, whatever file it comes from."""

from __future__ import annotations

import os

from ds4batch.tokenizer.from_directory import tokenizer_from_directory
from ds4batch.tokenizer.from_gguf import tokenizer_from_gguf
from ds4batch.tokenizer.model_tokenizer import ModelTokenizer


def load_tokenizer(path: str) -> ModelTokenizer:
    """The tokenizer of the GGUF file or the Hugging Face directory at `path`; no tensor is read.

    Raises ModelError, naming the file and the key, for a tokenizer that is broken or that cannot be rebuilt exactly.
    """
    return tokenizer_from_directory(path) if os.path.isdir(path) else tokenizer_from_gguf(path)
