"""Compiles kernels for a Hopper card (sm_90) on any machine, so that what only the interpreter has run is known to build.

Owns the compile in a child process, without the interpreter's environment variable, and the reading of the registers, spills and shared
memory of the result. It runs no kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULT = "compiled: "


class Variant(NamedTuple):
    """One kernel with one set of compile-time arguments."""

    module: str  # "triton_kernels.linear"
    kernel: str  # name of the @triton.jit function in it
    signature: dict[
        str, str
    ]  # run-time arguments in Triton's names of types: "*bf16", "i32", "fp32"; pointers count as 16-byte aligned
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    multiples: tuple[str, ...] = ()  # integers that are known to be multiples of 16


class Compiled(NamedTuple):
    """What a variant needs of a card."""

    registers: int  # per thread
    stack_bytes: int  # per thread; above 0, registers were spilled
    shared_bytes: int
    wgmma: bool  # uses the warp-group tensor-core instruction
    async_copy: bool  # copies global memory to shared memory asynchronously


def compile_for_hopper(variants: Sequence[Variant], timeout_s: float = 300) -> list[Compiled]:
    """Compile each variant for sm_90 in one child process. Raises RuntimeError with the compiler's words where one does not compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())],
        input=json.dumps(variants),
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout_s,
        check=False,
    )
    if child.returncode:
        raise RuntimeError(child.stderr[-6000:] or child.stdout[-6000:])
    lines = [line for line in child.stdout.splitlines() if line.startswith(RESULT)]
    return [Compiled(*json.loads(line[len(RESULT) :])) for line in lines]


def _compile(variant: Variant) -> Compiled:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget

    kernel = getattr(importlib.import_module(variant.module), variant.kernel)
    signature = {name: variant.signature.get(name, "constexpr") for name in kernel.arg_names}
    known = [kind.startswith("*") or name in variant.multiples for name, kind in signature.items()]
    aligned = {(i,): [["tt.divisibility", 16]] for i, is_known in enumerate(known) if is_known}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=variant.constexprs, attrs=aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, stack = _resources(built.asm["cubin"])
    text = built.asm["ptx"]
    return Compiled(registers, stack, built.metadata.shared, "wgmma.mma_async" in text, "cp.async" in text)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, as the card's own tool reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"no resource usage in {text!r}")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    for request in json.load(sys.stdin):
        print(RESULT + json.dumps(_compile(Variant(*request))), flush=True)
