"""Special tokens whose text is part of an answer, because answers are read by it. All others have no text there."""

MARKUP = frozenset(
    {
        "<think>", "</think>",
        "\uff5cDSML\uff5c",
        "<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>",
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
        "<|python_tag|>",
    }
)  # fmt: skip
