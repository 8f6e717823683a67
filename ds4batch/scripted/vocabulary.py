"""The vocabulary of a scripted model: a token a byte, and the markers of every dialect as tokens of their own."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from ds4batch.tokenizer.model_tokenizer import ModelTokenizer
from ds4batch.tokenizer.token_bytes import byte_level

BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
ENDS = (EOS, "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|user|>", "<|observation|>")
_MARKERS = (
    BOS, *ENDS, "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cSystem\uff5c>", "\uff5cDSML\uff5c", "[gMASK]", "<sop>",
    "<|system|>", "<|assistant|>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>",
    "<think>", "</think>", "<tool_call>", "</tool_call>",
)  # fmt: skip


def scripted_tokenizer(path: str) -> ModelTokenizer:
    """The tokenizer of the script at `path`, which gives the model its name."""
    alphabet = sorted(ByteLevel.alphabet())
    built = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    built.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    built.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in _MARKERS])
    ids = {marker: len(alphabet) + i for i, marker in enumerate(_MARKERS)}
    return ModelTokenizer(
        tokenizer=built,
        bytes_by_id=[*byte_level(alphabet), *(marker.encode() for marker in _MARKERS)],
        bos_id=ids[BOS],
        eos_id=ids[EOS],
        add_bos=False,
        stop_ids=frozenset(ids[end] for end in ENDS),
        special_ids=frozenset(ids.values()),
        chat_template=None,
        model_name=Path(path).stem,
        context=1 << 20,
    )
