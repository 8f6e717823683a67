"""What may be spent on the form of one answer. The front refuses by these numbers, the engine compiles by them.

The engine compiles between two steps, so a grammar holds up everybody's next token. At these limits that is 0.2 s, found with the demo
model's vocabulary on one core; 128 tools of 20 parameters are within them.
"""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_CHARS = 1 << 20
"""Of a grammar, JSON schemas included."""
MAX_OPTIONAL = 400
"""Members of one object that may be left out. Each is four items of the parser's row, which may have 2,000."""
MAX_MEMBERS = 2000
"""Of one object, that it must have or may. Compiling takes time with their square."""
MAX_TOOLS = 256
"""Of which one must be called, or which may be called beside a form. Each is compiled alone, so that a refusal can name it."""
MAX_PATTERN_PAIRS = 2048
"""Patterns of member names that are compared with each other, over a whole schema: 64 in one object. A pair takes some 30 us."""
LIMITS = LLParserLimits(max_grammar_size=50_000)
"""In llguidance's symbols."""
