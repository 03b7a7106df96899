"""Hugging Face folders for `benchmarks.mutations`: config.json, safetensors files, their headers
and index."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.mutations.odd_values import ODD, Change, damage, places, set_place
from pyops import hub
from pyops.models import BERT, GPT, T5, BERTConfig, GPTConfig, T5Config, ViT, ViTConfig

__all__ = ["Hub"]

SIZES: dict[str, Any] = {"vocab_size": 20, "num_layers": 2, "num_heads": 2, "dim": 8}
LLAMA = GPTConfig(
    **SIZES,
    sequence_length=8,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
    num_kv_heads=1,
    tied_head=False,
    rotary_stretch=2.0,
)
ROTARY = BERTConfig(
    **SIZES, sequence_length=8, positions="rotary", pooled_head=False, tied_head=False
)
MODELS = {
    "gpt2": lambda: GPT(GPTConfig(**SIZES, sequence_length=8, activation="gelu_tanh"), seed=1),
    "llama": lambda: GPT(LLAMA, seed=1),
    "bert": lambda: BERT(BERTConfig(**SIZES, sequence_length=8), seed=1),
    "roformer": lambda: BERT(ROTARY, seed=1),
    "t5": lambda: T5(
        T5Config(
            **SIZES, num_buckets=8, activation="gated_gelu", tied_head=False, scaled_head=False
        ),
        seed=1,
    ),
    "vit": lambda: ViT(
        ViTConfig(num_labels=3, image_size=4, patch_size=2, num_layers=1, num_heads=2, dim=8),
        seed=1,
    ),
}
DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.uint8,
)


class Hub:
    """One folder of each family, and one of several files with their index."""

    refusals = (hub.HubError,)

    def __init__(self, sound: Path) -> None:
        self._folders = {}
        for name, make in MODELS.items():
            hub.save(make(), sound / name)
            self._folders[name] = sound / name
        hub.save(MODELS["llama"](), sound / "split", max_file_bytes=1500)
        self._folders["split"] = sound / "split"
        for folder in self._folders.values():
            (folder / "tokenizer.json").write_text(
                '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'
            )

    def mutate(self, rng: random.Random, folder: Path) -> Change:
        name = rng.choice(list(self._folders))
        shutil.copytree(self._folders[name], folder)
        files = sorted(path.name for path in folder.iterdir())
        way = rng.choice(
            [
                self._field,
                self._field,
                self._tensor,
                self._header,
                self._index if name == "split" else self._field,
                damage,
            ]
        )
        change: Change = way(rng, folder, files)
        if way is damage:  # tensors are named, of which a damaged header has others
            change = replace(change, names=(*change.names, "the files"))
        return replace(change, text=f"{name}: {change.text}")

    def _field(self, rng: random.Random, folder: Path, files: list[str]) -> Change:
        told = json.loads((folder / "config.json").read_text())
        at = rng.choice(places(told))
        value: Any = rng.choice(ODD)
        if rng.random() < 0.15:
            del told[at[0]]
            at, value = at[:1], "removed"
        else:
            set_place(told, at, value)
        (folder / "config.json").write_text(json.dumps(told))
        return Change(
            f"config.json {'.'.join(map(str, at))} = {str(value)[:60]}",
            ("config.json", *map(str, at)),
            at=(at, value),
        )

    def _tensor(self, rng: random.Random, folder: Path, files: list[str]) -> Change:
        file = rng.choice([name for name in files if name.endswith(".safetensors")])
        tensors = load_file(folder / file)
        name = rng.choice(sorted(tensors))
        tensor = tensors.pop(name)
        way = rng.choice(["gone", "renamed", "cut", "longer", "dtype", "deeper", "turned", "extra"])
        names = [file, name, "extra.weight"]
        if way == "renamed":
            tensors[name + ".x"] = tensor
        elif way == "cut":
            tensors[name] = tensor[: len(tensor) // 2].clone()
        elif way == "longer":
            tensors[name] = torch.cat([tensor, tensor])
        elif way == "dtype":
            tensors[name] = tensor.to(rng.choice(DTYPES))
        elif way == "deeper":
            tensors[name] = tensor[None].clone()
        elif way == "turned":
            tensors[name] = (
                tensor.T.contiguous() if tensor.dim() == 2 else tensor.flip(0).contiguous()
            )
        elif way == "extra":
            tensors |= {name: tensor, "extra.weight": torch.ones(2)}
        save_file(tensors, folder / file, {"format": "pt"})
        return Change(
            f"{way} {name} of {file}", (*names, "the files hold")
        )  # several dtypes: named by what there is

    def _header(self, rng: random.Random, folder: Path, files: list[str]) -> Change:
        file = rng.choice([name for name in files if name.endswith(".safetensors")])
        content = (folder / file).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        at, value = rng.choice(places(header)), rng.choice(ODD)
        set_place(header, at, value)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        return Change(
            f"header of {file}: {'.'.join(map(str, at))} = {str(value)[:60]}",
            (file, str(at[0]), "the files hold"),
        )

    def _index(self, rng: random.Random, folder: Path, files: list[str]) -> Change:
        path = folder / "model.safetensors.index.json"
        told = json.loads(path.read_text())
        at, value = (
            rng.choice(places(told)),
            rng.choice([*ODD, "model-00001-of-00099.safetensors", "/etc/passwd", files[2]]),
        )
        set_place(told, at, value)
        path.write_text(json.dumps(told))
        return Change(
            f"index {'.'.join(map(str, at))} = {str(value)[:60]}",
            (path.name, ".safetensors", *map(str, at)),
        )

    def read(self, folder: Path, change: Change) -> str:
        """The model is written again: tensors must be those of the files, and fields what
        config.json says."""
        model = hub.load(folder)
        again = folder.with_name(folder.name + "-again")
        try:
            hub.save(model, again, like=folder)
            there: dict[str, Tensor] = {}
            for file in folder.glob("*.safetensors"):
                there |= load_file(file)
            for name, tensor in load_file(again / "model.safetensors").items():
                if name not in there or not torch.equal(
                    tensor.view(torch.uint8), there[name].view(torch.uint8)
                ):
                    return f"{name} is not what the files hold"
            told, written = (
                json.loads((place / "config.json").read_text()) for place in (folder, again)
            )
        finally:
            shutil.rmtree(again, ignore_errors=True)
        for key, value in told.items():
            if key in (
                "dtype",
                "torch_dtype",
                "architectures",
                "rope_theta",
                "rope_scaling",
                "rope_parameters",
            ):
                continue
            if written.get(key) != value and value is not None:
                return (
                    f"config.json has {key} = {value!r}, written again it is {written.get(key)!r}"
                )
        return ""
