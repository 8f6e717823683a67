"""What an agent and its model say to each other in one long task: the transcript that bench/replay.py plays.

Pure and seeded: the same name gives the same transcript. Owns the tools, and arguments and results as agents' look: paths, whole
files, patterns full of backslashes, text in several scripts, nested lists, numbers that languages spell in different ways. Knows no
API and no dialect.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

Json = dict[str, Any]

ROUND = 5  # turns from one question of the user to the answer that has no calls

TOOLS: dict[str, Json] = {
    "Read": {"file_path": {"type": "string"}, "offset": {"type": "integer"}, "limit": {"type": "integer"}},
    "Write": {"file_path": {"type": "string"}, "content": {"type": "string"}},
    "Edit": {
        "file_path": {"type": "string"},
        "old_string": {"type": "string"},
        "new_string": {"type": "string"},
        "replace_all": {"type": "boolean"},
    },
    "Bash": {"command": {"type": "string"}, "timeout": {"type": "number"}, "description": {"type": "string"}},
    "Grep": {
        "pattern": {"type": "string"},
        "path": {"type": "string"},
        "-n": {"type": "boolean"},
        "head_limit": {"type": "integer"},
        "globs": {"type": "array", "items": {"type": "string"}},
    },
    "TodoWrite": {"todos": {"type": "array", "items": {"type": "object", "properties": {"content": {"type": "string"}}}}},
    "apply_patch": {"input": {"type": "string"}},
}
"""The properties of each tool, in the order of its schema."""
FREEFORM = "apply_patch"  # which some clients offer as a tool that takes a text


class Call(NamedTuple):
    """One call. The model writes the arguments in their order here, which is seldom that of the schema."""

    tool: str
    arguments: Json


class Turn(NamedTuple):
    """One answer of the model, and what it answers."""

    asked: str  # by the user; "" where it follows results
    reminder: str  # that the client adds as a system message
    reasoning: str
    text: str
    calls: tuple[Call, ...]
    results: tuple[str, ...]  # one for each call


class Transcript(NamedTuple):
    """One task."""

    name: str
    system: str
    turns: tuple[Turn, ...]

    def after(self, number: int) -> str:
        """The words that the last message before turn `number` holds and nothing before it does."""
        return f"({self.name}, step {number})"


def transcript(name: str, turns: int) -> Transcript:
    """The task called `name`."""
    rng = random.Random(name)
    made: list[Turn] = []
    story = Transcript(name, _system(rng), ())
    for number in range(turns):
        first, last = number % ROUND == 0, number % ROUND == ROUND - 1 or number == turns - 1
        calls = () if last else tuple(_call(rng) for _ in range(rng.choice((1, 1, 2, 3))))
        made.append(
            Turn(
                f"{rng.choice(_QUESTIONS)} {story.after(number)}" if first else "",
                f"The files changed on disk. {_prose(rng, 20)}" if number % 11 == 7 else "",
                _prose(rng, rng.randint(8, 60)) + rng.choice(("", "\n\n- first `a < b && c`\n- then “ü”")),
                ""
                if calls and rng.random() < 0.4
                else _prose(rng, rng.randint(5, 40)) + rng.choice(("", "\n\n```sh\nls -l\n```")),
                calls,
                tuple(f"{_result(rng, call)}\n{story.after(number + 1)}" for call in calls),
            )
        )
    return story._replace(turns=tuple(made))


_QUESTIONS = (
    "Why does the build fail on Łódź paths?",
    "Bitte füge Tests für den Parser hinzu.",
    "ログを直してください。",
    "Refactor the module; keep `<tool_call>` literals as they are.",
)
_WORDS = (
    "the", "parser", "reads", "a", "token", "and", "file", "größer", "naïve", "κύκλος", "данные", "検索", "🙂", "x<y", "&amp;",
    "\"quoted\"", "C:\\temp\\new", "it's", "—", "100%", "config", "returns", "None,", "then", "checks", "each", "row.",
)  # fmt: skip
_PATHS = ("/home/ü/src/main.py", "/srv/app/README.md", "C:\\Users\\Zoë\\a b.txt", "./tests/test_日本.py", "src/lib/index.ts")
_COMMANDS = (
    "cd /srv && grep -rn \"TODO\\|FIXME\" --include='*.py' . | head -n 20",
    "python - <<'END'\nprint(\"a\\tb\", {1: 'é'}, [x for x in range(3) if x < 2])\nEND",
    "git log --oneline -5; echo '</done>' \"$HOME\" 'it'\\''s'",
    "jq '.[] | {id, \"näme\": .n}' data.json > out.json 2>&1",
)
_PATTERNS = (r"^\s*def\s+(\w+)\(", r"\"(?:[^\"\\]|\\.)*\"", r"</?[a-z]+>", r"[äöü]{2,}\b")
_CODE = (
    "def read(path: str) -> dict[str, int]:",
    '    """Read “path”; \\n is kept, \\u00e9 too."""',
    "\twith open(path, 'rb') as file:  # Ünïcode ✓",
    "        return {k: v for k, v in parse(file.read()) if v < 10 and k != '\\\\'}",
    "",
    '</html> <think>not a thought</think> {"a": [1, 2.50, null]}',
    "print(f'{x!r:>10}', \"\\x00\", '\u2028', '\U0001f680')",
)


def _prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words))


def _lines(rng: random.Random, lines: int) -> str:
    return "\n".join(rng.choice(_CODE) for _ in range(lines)) + rng.choice(("", "\n"))


def _system(rng: random.Random) -> str:
    rules = "\n".join(f"{i}. {_prose(random.Random(i), 30)}" for i in range(20))
    return f"You are an agent at work on a computer.\n\n# Rules\n{rules}\n\n# Environment\nToday is day {rng.randint(1, 365)}."


def _call(rng: random.Random) -> Call:
    tool = rng.choice(list(TOOLS))
    path = rng.choice(_PATHS)
    arguments: dict[str, Json] = {
        "Read": {"file_path": path, "limit": rng.randint(1, 2000), "offset": rng.randint(0, 99)},
        "Write": {"file_path": path, "content": _lines(rng, rng.randint(2, 24))},
        "Edit": {
            "file_path": path,
            "old_string": _lines(rng, 2),
            "new_string": _lines(rng, 3),
            "replace_all": rng.random() < 0.5,
        },
        "Bash": {"command": rng.choice(_COMMANDS), "description": _prose(rng, 4), "timeout": rng.choice((120000, 1.5, 30.0))},
        "Grep": {"pattern": rng.choice(_PATTERNS), "path": path, "-n": True, "globs": ["*.py", "**/*.{ts,tsx}"], "head_limit": 5},
        "TodoWrite": {
            "todos": [
                {"content": _prose(rng, 4), "status": rng.choice(("pending", "completed")), "activeForm": "Läuft", "id": i}
                for i in range(rng.randint(0, 4))
            ]
        },
        FREEFORM: {"input": f"*** Begin Patch\n*** Update File: {path}\n@@\n-{_lines(rng, 1)}\n+{_lines(rng, 2)}\n*** End Patch"},
    }
    given = arguments[tool]
    keys = list(given)
    rng.shuffle(keys)
    return Call(tool, {key: given[key] for key in keys})


def _result(rng: random.Random, call: Call) -> str:
    match call.tool:
        case "Read":
            return "\n".join(f"{i:6}\t{rng.choice(_CODE)}" for i in range(1, rng.randint(5, 60)))
        case "Bash" | "Grep":
            return _lines(rng, rng.randint(0, 20))
        case "TodoWrite":
            return '{"ok": true, "count": 1.0}'
        case _:
            return f"The file {call.arguments.get('file_path', 'a.py')} has been updated."
