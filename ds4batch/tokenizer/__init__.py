"""Text <-> token ids, from the model's own file. Imports no torch, so that the HTTP process can use it."""

from ds4batch.tokenizer.load import load_tokenizer
from ds4batch.tokenizer.model_tokenizer import ModelTokenizer

__all__ = ["ModelTokenizer", "load_tokenizer"]
