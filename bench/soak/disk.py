"""The directory of the checkpoints: a small file system that can really be full, and damage to what lies in it.

Owns the directory and the mount. Where a file system can be mounted it is a tmpfs of its own, filled to the last byte by a file; where
not, the engine's processes may write no file beyond a size (RLIMIT_FSIZE), which fails their writes as well.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from pathlib import Path
from random import Random

FILL_BLOCK = 1 << 20
SMALL_FILE = 64 << 10  # bytes a file may have while the limit stands for a full disk


class DiskRoom:
    """A place for checkpoints. Use as a context manager."""

    def __init__(self, parent: Path, megabytes: int) -> None:
        self.directory = parent / "disk"
        self._megabytes = megabytes
        self.mounted = False
        self._limited: dict[int, tuple[int, int]] = {}

    def __enter__(self) -> DiskRoom:
        self.directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._megabytes}m,mode=700", "ds4batch-soak", str(self.directory)]
        with contextlib.suppress(OSError):
            self.mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        return self

    def __exit__(self, *_: object) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.directory)], capture_output=True, check=False)
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def checkpoints(self) -> Path:
        """Where the server keeps them."""
        return self.directory / "kv"

    @property
    def method(self) -> str:
        """How the disk is made full here."""
        return (
            "a file fills a tmpfs of its own" if self.mounted else "RLIMIT_FSIZE of the engine; no file system could be mounted"
        )

    def files(self) -> list[Path]:
        """The checkpoints that are there."""
        return sorted(self.checkpoints.glob("*.kv")) if self.checkpoints.is_dir() else []

    def fill(self, engine: int) -> str:
        """Make the disk full, or full again where something gave way; what was done, in words."""
        if not self.mounted:
            before = self._limited.setdefault(engine, resource.prlimit(engine, resource.RLIMIT_FSIZE))
            resource.prlimit(engine, resource.RLIMIT_FSIZE, (SMALL_FILE, before[1]))
            return f"files of at most {SMALL_FILE} bytes"
        # The smallest block last: what is left must be too little for anybody.
        with (self.directory / "filler").open("ab", buffering=0) as file:
            for block in (FILL_BLOCK, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(block))
            size = file.tell()
        return f"{size >> 20} MiB written until ENOSPC"

    def clear(self) -> None:
        """Give the room back."""
        (self.directory / "filler").unlink(missing_ok=True)
        for engine, before in self._limited.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(engine, resource.RLIMIT_FSIZE, before)
        self._limited.clear()


def damage(path: Path, rnd: Random, reader: int) -> str:
    """Spoil one file, in place, in one of the ways in which files go bad; what was done.

    Not while the process `reader` has it open or mapped: it verifies every byte before it uses any, and a disk that loses a page
    between the two is more than a file can be defended against. The file may vanish meanwhile.
    """
    how = rnd.choice(("bit", "bytes", "head", "cut", "empty", "grown"))
    if _in_use(path, reader):
        return "in use"
    try:
        size = path.stat().st_size
        with path.open("r+b", buffering=0) as file:
            match how:
                case "bit":
                    at = rnd.randrange(size)
                    os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, at)[0] ^ (1 << rnd.randrange(8))]), at)
                case "bytes":
                    os.pwrite(file.fileno(), rnd.randbytes(64), rnd.randrange(max(1, size - 64)))
                case "head":
                    os.pwrite(file.fileno(), rnd.randbytes(64), 0)
                case "cut":
                    file.truncate(rnd.randrange(size))
                case "empty":
                    file.truncate(0)
                case "grown":
                    os.pwrite(file.fileno(), rnd.randbytes(100), size)
    except (OSError, ValueError, IndexError):
        return "gone"
    return how


def _in_use(path: Path, reader: int) -> bool:
    """Whether a process has the file open or mapped."""
    name = str(path)
    with contextlib.suppress(OSError):
        if any(line.rstrip().endswith(name) for line in Path(f"/proc/{reader}/maps").read_text(encoding="utf-8").splitlines()):
            return True
        for link in Path(f"/proc/{reader}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link) == name:
                    return True
    return False
