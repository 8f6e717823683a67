"""Every option of the server, once: name, default, meaning. Nothing else reads argv; the environment says nothing but where systemd
listens (server/notify.py).

docs/options.md and deploy/ds4batch.toml are written from here by scripts/options.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any


def _option(
    default: Any,
    help: str,
    *,
    short: str = "",
    metavar: str = "N",
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    auto: bool = False,
    group: str = "",
) -> Any:
    """`auto`: 0 stands beside low..high, for what the device suggests. `group`: the title of the group that begins here."""
    meta = {"help": help, "short": short, "metavar": metavar, "low": low, "high": high, "choices": tuple(choices), "auto": auto}
    return field(default=default, metadata={**meta, "group": group})


CONFIG_HELP = "take options from this TOML file, where they have the names of these flags; what the command line gives goes before it"


@dataclass(frozen=True)
class Settings:
    """The options of `ds4batch serve`. A field's name is its flag with underscores."""

    model: str = _option(
        "", "the model: a GGUF file, or a directory with config.json and safetensors", short="-m", metavar="FILE", group="Model"
    )
    served_name: str = _option("", "model id in /v1/models; by default the file's name", metavar="NAME")
    script: str = _option(
        "", "serve no model: answer as this file says, which is JSON; for demonstrations and tests of clients", metavar="FILE"
    )
    dialect: str = _option(
        "auto",
        "how conversations are written and answers read; auto looks at the model, jinja uses its own chat template",
        metavar="NAME",
        choices=("auto", "deepseek-v4", "deepseek-v4.1", "glm", "qwen3.8", "jinja"),
    )
    batched_session: int = _option(
        1, "resident sessions, each with its own slot", low=1, high=1024, group="Sessions"
    )
    ctx: int = _option(32768, "context length of every session, in tokens", short="-c", low=16, high=1 << 24)
    tokens: int = _option(
        393216, "max_tokens of a request that names none; the context's room is the other limit", short="-n", low=1
    )
    host: str = _option(
        "127.0.0.1", "address to listen on; 0.0.0.0 opens the server to the network", metavar="ADDR", group="Network and keys"
    )
    port: int = _option(8000, "port to listen on; 0 takes a free one", low=0, high=65535)
    cors: bool = _option(False, "let web pages of any origin call the server")
    api_key_file: str = _option(
        "", "let in who has a key of this file, which `ds4batch keys` makes; it is read again when it changes", metavar="FILE"
    )
    tls_cert: str = _option("", "serve HTTPS with this certificate chain (PEM); it is read again when it changes", metavar="FILE")
    tls_key: str = _option("", "the private key of --tls-cert (PEM, not encrypted)", metavar="FILE")
    max_connections: int = _option(
        0, "connections that may be open at once, more get 503; 0 is what the process's limit on open files leaves", low=0
    )
    max_body_mb: int = _option(64, "MiB that the body of a request may have, decompressed; larger ones get 413", low=1, high=1024)
    header_timeout: float = _option(
        10.0, "seconds within which the headers of a request must have arrived, else 408; 0 waits for ever", metavar="S", low=0
    )
    body_timeout: float = _option(
        300.0, "seconds within which the body of a request must have arrived, else 408; 0 waits for ever", metavar="S", low=0
    )
    request_timeout: float = _option(
        0.0, "seconds that a request may take from its last byte to the end of its answer; then it ends with an error; 0 is no limit",
        metavar="S",
        low=0,
    )
    chdir: str = _option("", "change to this directory before any path is opened", metavar="DIR", group="Process")
    mixed_prefill_quantum: int = _option(
        0,
        "most prompt tokens a step takes while others decode; 0 is 128 on a CPU, 1024 on a GPU",
        low=16,
        high=65536,
        auto=True,
        group="Scheduling",
    )
    idle_prefill_quantum: int = _option(
        0,
        "most prompt tokens a step takes while nobody decodes; 0 is 2048 on a CPU, 4096 on a GPU",
        low=16,
        high=65536,
        auto=True,
    )
    itl_budget_ms: float = _option(
        0.0,
        "how long a step with decoders in it may take; the prompt's share is sized to fit; 0 is 100 on a CPU, 15 on a GPU",
        metavar="MS",
        low=1,
        auto=True,
    )
    max_queue: int = _option(0, "requests that may wait for a slot before 429; 0 is four a session, at least 64", low=0)
    threads: int = _option(0, "CPU threads of the engine; 0 leaves it to torch", short="-t", low=0, high=4096, group="Device")
    device: str = _option("auto", "where the model runs", metavar="DEV", choices=("auto", "cpu", "cuda"))
    dtype: str = _option(
        "auto", "type of weights that do not stay quantised; auto is bf16", metavar="TYPE", choices=("auto", "bf16", "fp32")
    )
    dequantise: bool = _option(
        False,
        "convert quantised weights to --dtype at load; else a GPU keeps the formats it can multiply (but not of a model below 1 GiB), "
        "a CPU always converts",
    )
    load_format: str = _option(
        "auto",
        "auto loads the model's weights; dummy makes random ones of its shape (a directory needs no safetensors)",
        metavar="HOW",
        choices=("auto", "dummy"),
    )
    kv_cache_dtype: str = _option(
        "auto",
        "type of keys and values in memory; auto is bf16 on a GPU and fp32 on a CPU; fp8 (e4m3, GPU only) halves them",
        metavar="TYPE",
        choices=("auto", "bf16", "fp8"),
    )
    page_tokens: int = _option(
        0, "tokens in a page of the KV pool; 0 is the whole context on a CPU, 256 on a GPU", low=0, group="Memory of sessions"
    )
    kv_pool_tokens: int = _option(
        0,
        "tokens that the KV pool holds for all sessions together; 0 is --batched-session x --ctx. With less, sessions take what they "
        "use, idle ones give way, and what came last may have to wait in host memory",
        low=0,
    )
    kv_disk_dir: str = _option(
        "",
        "keep sessions on disk in this directory, so that they survive other requests, restarts and crashes",
        metavar="DIR",
        group="Sessions on disk",
    )
    kv_disk_space_mb: int = _option(
        4096,
        "MiB that the checkpoints in --kv-disk-dir may take; 0 is no limit; files of a later version are left alone and not counted",
        low=0,
    )
    kv_disk_max_file_mb: int = _option(0, "MiB that one checkpoint may take; 0 leaves it to --kv-disk-space-mb", low=0)
    kv_disk_min_free_mb: int = _option(1024, "MiB that a checkpoint leaves free on the file system", low=0)
    kv_cache_min_tokens: int = _option(512, "shorter sessions are neither saved nor restored", low=1)
    kv_cache_cold_max_tokens: int = _option(
        30000, "longest prompt that is saved on the way when nothing of it was known; 0 saves none", low=0
    )
    kv_cache_continued_interval_tokens: int = _option(10000, "tokens between the saves of a session that grows; 0 is off", low=0)
    kv_cache_boundary_trim_tokens: int = _option(32, "tokens of a prompt's end that a cold save leaves out", low=0)
    kv_cache_boundary_align_tokens: int = _option(2048, "cold and periodic saves are at multiples of so many tokens", low=1)
    kv_cache_reject_different_quant: bool = _option(
        False, "always so, whether given or not: a checkpoint is only used by the very weights and types that wrote it"
    )
    tool_memory_max_ids: int = _option(100000, "calls whose sampled text is remembered, to be replayed as it was", low=0, group="Tools")
    disable_exact_dsml_tool_replay: bool = _option(False, "write the calls of a history anew instead of as they were sampled")
    mtp: bool = _option(False, "the same as --draft mtp", group="Drafts")
    mtp_draft: int = _option(1, "tokens that are guessed ahead for a session in a cycle, by whatever drafts", low=1, high=8)
    draft: str = _option(
        "none",
        "guess tokens ahead and check them in one forward, where that is measured to be faster; answers stay the same. mtp: by the "
        "model's own draft layers; lookup: by what followed the last tokens when they stood in the conversation before",
        metavar="HOW",
        choices=("none", "lookup", "mtp"),
    )
    mtp_head: str = _option(
        "", "weights of an MTP module for --draft mtp; by default what lies beside the model or ships with this package", metavar="FILE"
    )
    stall_timeout: float = _option(
        300.0,
        "seconds after which a request in a slot of which nothing came, while the engine runs, ends with an error, and an engine that "
        "makes no step is killed and started again; 0 waits for ever",
        metavar="S",
        low=0,
        group="Watching and logs",
    )
    log_format: str = _option("text", "how the process log on stderr is written", metavar="HOW", choices=("text", "json"))
    log_level: str = _option(
        "info",
        "what the process log leaves out: all below this; the record of each request is of level info",
        metavar="LEVEL",
        choices=("debug", "info", "warning", "error"),
    )
    log_text: bool = _option(
        False, "let the log quote users: where a prompt left the nearest session, and what a refused request was told about a field"
    )
    request_log: str = _option(
        "", "append one JSON line a request to this file instead of to the process log; SIGHUP opens it anew", metavar="FILE"
    )
    trace: str = _option(
        "", "append each request's prompt, decisions and output to this file, which its owner alone may read; SIGHUP opens it anew",
        metavar="FILE",
    )
    gpu_stats: bool = _option(False, "log device memory with every request and export it in /metrics")

    def resolved(self, device: str) -> Settings:
        """The same with what is left to the device, "cpu" or "cuda", filled in."""
        mixed, idle, budget = (1024, 4096, 15.0) if device == "cuda" else (128, 2048, 100.0)
        return replace(
            self,
            mixed_prefill_quantum=self.mixed_prefill_quantum or mixed,
            idle_prefill_quantum=self.idle_prefill_quantum or idle,
            itl_budget_ms=self.itl_budget_ms or budget,
        )

    @property
    def drafter(self) -> str:
        """What drafts: "none", "lookup" or "mtp"."""
        return "mtp" if self.mtp else self.draft

    @property
    def drafts(self) -> int:
        """Tokens that are guessed ahead for a session, at most; 0 where nothing drafts."""
        return 0 if self.drafter == "none" else self.mtp_draft

    @property
    def queue_limit(self) -> int:
        """Requests that may wait at once."""
        return self.max_queue or max(64, 4 * self.batched_session)


def flag(name: str) -> str:
    """The flag of an option, and with it its name in a configuration file behind the dashes."""
    return "--" + name.replace("_", "-")


def meaning(option: Field[Any]) -> str:
    """What an option is for, and which values it has where they are few."""
    text: str = option.metadata["help"]
    choices: Sequence[str] = option.metadata["choices"]
    return f"{text}; one of {', '.join(choices)}" if choices else text


def grouped() -> list[tuple[str, list[Field[Any]]]]:
    """All options under the titles of their groups, in order."""
    groups: list[tuple[str, list[Field[Any]]]] = []
    for option in fields(Settings):
        if option.metadata["group"]:
            groups.append((option.metadata["group"], []))
        groups[-1][1].append(option)
    return groups


def check(option: Field[Any], value: Any, shown: str) -> None:
    """Raise ValueError, saying what is wrong, for a value of the option's type that it does not take."""
    meta = option.metadata
    low, high, choices = meta["low"], meta["high"], meta["choices"]
    if choices and value not in choices:
        raise ValueError(f"{shown!r} is not one of {', '.join(choices)}")
    if isinstance(value, str | bool) or (meta["auto"] and value == 0):
        return
    if value != value or (low is not None and value < low):
        raise ValueError(f"{shown} is below {low:g}")
    if high is not None and value > high:
        raise ValueError(f"{shown} is above {high:g}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` one flag a field of Settings, and --config."""
    parser.add_argument("--config", default="", metavar="FILE", help=CONFIG_HELP)
    for title, options in grouped():
        group = parser.add_argument_group(title)
        for option in options:
            _add(group, option)


def _add(group: argparse._ArgumentGroup, option: Field[Any]) -> None:
    meta = option.metadata
    names = ([meta["short"]] if meta["short"] else []) + [flag(option.name)]
    if isinstance(option.default, bool):
        group.add_argument(
            *names, dest=option.name, action=argparse.BooleanOptionalAction, default=option.default, help=meaning(option)
        )
        return
    shown = "" if option.default == "" else f" (default: {option.default})"
    group.add_argument(
        *names,
        dest=option.name,
        default=option.default,
        metavar=meta["metavar"],
        help=meaning(option) + shown,
        type=_parser_of(option),
    )


def from_arguments(args: argparse.Namespace) -> Settings:
    """The settings that parsed arguments spell."""
    return Settings(**{f.name: getattr(args, f.name) for f in fields(Settings)})


def _parser_of(option: Field[Any]) -> Any:
    kind: Any = type(option.default)

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        try:
            check(option, value, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return parse
