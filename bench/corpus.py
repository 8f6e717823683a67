"""The text that prompts are cut from: generated prose, the repository's own source, or a file. No network.

Owns text only; how it becomes a prompt is decided in prompts.py.
"""

from __future__ import annotations

from pathlib import Path

from bench import seeded

PROSE_CHARACTERS = 1 << 19
ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("ds4batch", "scheduler", "triton_kernels", "bench")

_PEOPLE = (
    "the harbour master",
    "a young surveyor",
    "the baker's daughter",
    "our old teacher",
    "the night porter",
    "an engineer",
    "the cartographer",
    "a retired pilot",
    "the librarian",
    "two fishermen",
    "the clockmaker",
    "a visiting doctor",
)
_ACTS = (
    "described",
    "measured",
    "repaired",
    "painted",
    "remembered",
    "questioned",
    "carried away",
    "wrote down",
    "discovered",
    "sold",
    "borrowed",
    "explained",
    "counted",
    "compared",
    "set aside",
    "looked for",
)
_THINGS = (
    "the broken lighthouse lamp",
    "a map of the northern valleys",
    "the price of copper",
    "seventeen glass bottles",
    "the rules of the river ferry",
    "a letter without a sender",
    "the first railway timetable",
    "the colour of the winter sea",
    "an unfinished stone bridge",
    "the weight of the market bell",
    "a notebook full of tides",
    "the garden behind the mill",
    "three kinds of mountain grass",
    "the sound of the old printing press",
)
_PLACES = (
    "near the eastern gate",
    "in a room above the bakery",
    "at the edge of the forest",
    "on the road to the salt mines",
    "beside the long canal",
    "under the roof of the observatory",
    "in the shadow of the dam",
    "at the quiet end of the harbour",
)
_TIMES = (
    "Early in the morning",
    "Long before the storm",
    "On the third day of the fair",
    "When the snow had melted",
    "After the council met",
    "Toward the end of that year",
    "Every other evening",
    "While the bells were ringing",
)
_REASONS = (
    "because nobody else had thought of it",
    "although the weather was against them",
    "so that the children might learn from it",
    "until the lamps went out",
    "without asking for any payment",
    "before the last boat left",
    "as if it were a matter of honour",
    "which surprised the whole village",
)


def prose(characters: int = PROSE_CHARACTERS) -> str:
    """Plain English sentences in paragraphs, the same on every machine."""
    rng = seeded.generator(0, "prose")
    parts: list[str] = []
    length = 0
    while length < characters:
        sentence = (
            f"{rng.choice(_TIMES)}, {rng.choice(_PEOPLE)} {rng.choice(_ACTS)} {rng.choice(_THINGS)} "
            f"{rng.choice(_PLACES)}, {rng.choice(_REASONS)}."
        )
        parts.append(sentence + ("\n\n" if rng.random() < 0.2 else " "))
        length += len(parts[-1])
    return "".join(parts)


def code(root: Path = ROOT) -> str:
    """The repository's documents and Python source, in the order of their paths; it changes when they do."""
    files = sorted((root / "docs").rglob("*.md"))
    for folder in CODE_FOLDERS:
        files += sorted((root / folder).rglob("*.py"))
    return "\n\n".join(path.read_text(encoding="utf-8") for path in files)


def from_file(path: Path) -> str:
    """The text of `path`. Raises ValueError naming the file when it cannot be read as text or holds none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not text.strip():
        raise ValueError(f"{path}: the file holds no text")
    return text
