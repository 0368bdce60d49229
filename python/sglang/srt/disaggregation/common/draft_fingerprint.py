"""Identity of a checkpoint's weights, cheap enough to take at every start.

Two drafts of the same shape have the same configuration and the same tensor headers, so
neither tells them apart; hashing gigabytes at start would. This reads the safetensors
headers (names, dtypes, shapes, offsets) and a few evenly spaced blocks of the data:
retrained or requantised weights differ in every block, equal files in none.

Pure standard library, because the doctor uses it without SGLang.
"""

from __future__ import annotations

import hashlib
import os
import pathlib

BLOCK_BYTES = 1024
BLOCKS_PER_CHECKPOINT = 256
_LENGTH_BYTES = 8
_LARGEST_HEADER = 128 << 20


def checkpoint_fingerprint(folder: str | os.PathLike | None) -> str | None:
    """16 hex digits for a local checkpoint folder; None when it cannot be read.

    Depends on the content alone: neither the folder's name nor file times count. A
    folder without safetensors files (dummy weights, other formats) has no fingerprint.
    """
    if not folder:
        return None
    files = sorted(pathlib.Path(folder).glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    blocks = max(1, BLOCKS_PER_CHECKPOINT // len(files))
    try:
        for path in files:
            _add_file(digest, path, blocks)
    except (OSError, ValueError):
        return None
    return digest.hexdigest()[:16]


def _add_file(digest, path: pathlib.Path, blocks: int) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < header_bytes <= min(size, _LARGEST_HEADER):
            raise ValueError(f"{path} is not a safetensors file")
        digest.update(file.read(header_bytes))
        start = _LENGTH_BYTES + header_bytes
        stride = max(BLOCK_BYTES, (size - start) // blocks)
        for offset in range(start, size, stride):
            file.seek(offset)
            digest.update(file.read(BLOCK_BYTES))
        file.seek(max(start, size - BLOCK_BYTES))
        digest.update(file.read(BLOCK_BYTES))
