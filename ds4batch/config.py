"""The configuration file of `ds4batch serve`: TOML, one key an option, named as its flag. The file's values become the flags' defaults."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import Field, fields
from typing import Any

from ds4batch.settings import Settings, check, flag

_KINDS = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}


class ConfigError(Exception):
    """The file cannot be used; the message names it, the line and the key."""


def read_config(path: str) -> dict[str, Any]:
    """The options that the file gives, by the names of Settings' fields. Raises OSError and ConfigError."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        text = data.decode()
        given = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    options = {flag(option.name)[2:]: option for option in fields(Settings)}
    found = {}
    for key, value in given.items():
        try:
            option = _option(options, key, value)
            found[option.name] = _value(option, value)
        except ValueError as error:
            raise ConfigError(f"{path}{_line(text, key)}: {key}: {error}") from None
    return found


def _option(options: dict[str, Field[Any]], key: str, value: Any) -> Field[Any]:
    if key in options:
        return options[key]
    if isinstance(value, dict):
        raise ValueError("there are no sections, all options stand at the top")
    near = difflib.get_close_matches(key.replace("_", "-"), options, 1)
    raise ValueError("there is no such option" + (f", did you mean {near[0]}?" if near else ""))


def _value(option: Field[Any], value: Any) -> Any:
    kind = type(option.default)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"expected {_KINDS[kind]}, got {value!r}")
    check(option, value, str(value))
    return value


def _line(text: str, key: str) -> str:
    """Where a key stands, which the parser does not tell."""
    spelled = "|".join(re.escape(form) for form in (key, f'"{key}"', f"'{key}'"))
    match = re.search(rf"^[ \t]*(?:\[+[ \t]*)?(?:{spelled})[ \t]*[=.\]]", text, re.MULTILINE)
    return "" if match is None else f", line {text.count(chr(10), 0, match.start()) + 1}"
