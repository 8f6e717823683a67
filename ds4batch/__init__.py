"""ds4batch: an LLM server for one box shared by several people."""

__version__ = "0.1.0"
