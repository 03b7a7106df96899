"""A Hugging Face folder: its config.json, and its tensors, read box by box through safetensors.

    config.json                                   architecture and sizes
    model.safetensors                             all tensors, or
    model-00001-of-00002.safetensors, ...         several files, and
    model.safetensors.index.json                  which tensor is in which

Files are mapped, and of a tensor only the bytes of the wanted rows are touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pyops.checkpoint import CheckpointError
from pyops.checkpoint.convert import weight_files
from pyops.checkpoint.format.repository import how_to_fetch
from pyops.flat import Box

__all__ = [
    "CONFIG",
    "FLOATING",
    "HubError",
    "Weights",
    "is_hub_folder",
    "open_weights",
    "read_config",
]

CONFIG = "config.json"
MAX_CONFIG = 16 << 20  # bytes
FLOATING = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class HubError(ValueError):
    """A Hugging Face folder can't be read or written; the message names the file or the tensors,
    and the fix."""


def is_hub_folder(path: Path | str) -> bool:
    """Whether this is a folder with a config.json and safetensors files.

    Args:
        path: The folder, which need not exist.
    """
    folder = Path(path)
    return (folder / CONFIG).is_file() and any(folder.glob("*.safetensors"))


def read_config(folder: Path | str) -> dict[str, Any]:
    """What config.json says.

    Raises:
        HubError: When it is missing or damaged.
    """
    path = Path(folder) / CONFIG
    try:
        if path.stat().st_size > MAX_CONFIG:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise HubError(
            f"{path} does not exist; name a folder that save_pretrained of transformers "
            f"wrote{how_to_fetch(folder, bare=True)}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise HubError(f"{path} is damaged ({error}); fetch it again") from None
    if not isinstance(found, dict):
        raise HubError(f"{path} is damaged (it holds no object); fetch it again")
    return found


class Weights:
    """The tensors of a folder: `shapes` and `dtypes` by name, `read` for a box of one. bytes_read:
    of all boxes so far."""

    def __init__(self, slices: dict[str, Any], files: dict[str, Path]) -> None:
        self._slices, self._files = slices, files
        self.shapes = {name: tuple(found.get_shape()) for name, found in slices.items()}
        self.dtypes = {name: found.get_dtype() for name, found in slices.items()}
        self.bytes_read = 0

    def read(self, name: str, box: Box) -> Tensor:
        """Box (offset, size) of a tensor: a new tensor on the CPU, or a view of the mapped file.

        Raises:
            HubError: For damage.
        """
        where = tuple(slice(start, start + length) for start, length in zip(*box, strict=True))
        try:
            found: Tensor = self._slices[name][where] if where else self._slices[name][...]
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise HubError(
                f"{self._files[name]} is damaged at {name} ({error}); fetch it again"
            ) from None
        self.bytes_read += found.numel() * found.element_size()
        return found


@contextmanager
def open_weights(folder: Path | str) -> Iterator[Weights]:
    """The folder's tensors while the files are open.

    Raises:
        HubError: For files that are missing, damaged or cut short.
    """
    folder = Path(folder)
    try:
        wanted = weight_files(folder)
    except CheckpointError as error:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        hint = (
            f"; {pickled[0]} is a pickle, which is not read: save it anew with transformers"
            if pickled
            else ""
        )
        raise HubError(f"{error}{hint}") from None
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        files: dict[str, Path] = {}
        for path, names in wanted.items():
            try:
                opened = stack.enter_context(safe_open(path, "pt"))
            except (SafetensorError, OSError) as error:
                raise HubError(
                    f"{path} is missing, damaged or cut short ({error}); fetch it again"
                ) from None
            held = set(opened.keys())
            lacking = sorted(set(names or ()) - held)
            if lacking:
                raise HubError(
                    f"{path} lacks {lacking[:3]}, which its index says it has; fetch it again"
                )
            for name in names or sorted(held):
                slices[name], files[name] = opened.get_slice(name), path
        yield Weights(slices, files)


def floating(dtypes: dict[str, str]) -> set[torch.dtype]:
    """The floating dtypes among these names of safetensors."""
    return {FLOATING[dtype] for dtype in dtypes.values() if dtype in FLOATING}
