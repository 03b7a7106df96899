"""Small models of transformers as folders, and what ranks do with them, in the tests of
pyops.hub.pretrained."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from pyops.flat import Placement
from pyops.hub.folder_files import Weights
from pyops.hub.pretrained import PretrainedWeights, empty_model, save_pretrained
from pyops.mesh import Axes, Mesh
from pyops.tensor_parallel import parallelize
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.tensor_parallel.convert import existing_models

V = existing_models.V


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=V,
        hidden_size=24,
        intermediate_size=30,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        tie_word_embeddings=False,
    )
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.25)
    return model


def llama_tied() -> nn.Module:
    torch.manual_seed(3)
    model, _ = existing_models._llama("Llama", 0.0, tie_word_embeddings=True)
    return model


OF_OTHERS = ("llama", "qwen3", "gpt2", "bert", "t5", "t5, gated", "vit")
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: existing_models.build(name)[0] for name in OF_OTHERS},
    "llama, tied": llama_tied,
    "mixtral": mixtral,
}


def filled(folder: Path | str, **options: Any) -> nn.Module:
    """A model of the folder on this process."""
    model = empty_model(folder)
    with PretrainedWeights(folder) as weights:
        weights.check(model, **options)
        fill_all(model, weights)
    return model


def fill_all(model: nn.Module, weights: PretrainedWeights) -> None:
    """Values for one module after the other."""
    give_memory(model)
    for module in model.modules():
        weights.fill(module)


def give_memory(model: nn.Module) -> None:
    """To parameters on the meta device, tied ones once."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty_like(p, device="cpu"))
                module._parameters[key] = made[id(p)]


def cut_over_ranks(rank: int, group: Any, folder: str, to: str) -> dict[str, Any]:
    """Cut, filled, and saved by two ranks: this rank's part, with its placements."""
    model = empty_model(folder)
    with PretrainedWeights(folder) as weights:
        weights.check(model)
        parallelize(model, group=group, check=False)
        assert all(p.is_meta for p in model.parameters())
        fill_all(model, weights)
    save_pretrained(model, to, mesh=Mesh(Axes(tp=2)), max_file_bytes=20_000)
    # Under a module's own names: a Conv1D's [out, in] must not be mistaken for the file's.
    return {
        "values": {name: p.detach().clone() for name, p in model.named_parameters()},
        "placements": Placement.of(model),
    }


class Nothing(nn.Module):
    """Where another rank has the module."""


def as_stages(rank: int, group: Any, folder: str, to: str) -> list[str]:
    """Two ranks with half of the blocks each, as of a pipeline; the names that this one has."""
    model: Any = filled(folder)
    model.model.layers[1 - rank] = Nothing()
    if rank == 0:
        model.model.norm = Nothing()
        model.lm_head = Nothing()
    else:
        model.model.embed_tokens = Nothing()
    save_pretrained(model, to, mesh=Mesh(Axes(pp=2)))
    return [name for name, _ in model.named_parameters()]


def with_zero(rank: int, group: Any, folder: str, to: str, stage: int) -> int:
    """Filled part by part into the shards of ZeRO; how many bytes of files this rank read."""
    model = empty_model(folder)
    with PretrainedWeights(folder) as weights:
        weights.check(model)
        config = ZeroConfig(stage=stage, initialize=weights.fill)
        optimizer = ZeroOptimizer(model, torch.optim.SGD, config, lr=0.1)
        read = weights.bytes_read
    with optimizer.whole_parameters():
        save_pretrained(model, to, mesh=Mesh(Axes(dp=2)))
    optimizer.close()
    return read


class LiveMemory(TorchDispatchMode):
    """Counts bytes of storages that tensors have, except on the meta device: `peak` and `live`.
    What `Weights.read` gives is counted too; it comes from outside of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._holders: dict[int, int] = {}

    def restart(self) -> None:
        """Count from here on."""
        self.live = self.peak = 0

    def __enter__(self) -> LiveMemory:
        self._read = read = Weights.read
        count = self.count

        def counted(weights: Weights, name: str, box: Any) -> Tensor:
            found = read(weights, name, box)
            count(found)
            return found

        Weights.read = counted  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        Weights.read = self._read  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(value) for value in tree_flatten((args, kwargs))[0]}
        for value in tree_flatten(result)[0]:
            if isinstance(value, Tensor) and id(value) not in given:
                self.count(value)
        return result

    def count(self, tensor: Tensor) -> None:
        if tensor.is_meta or not tensor.numel():
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage.data_ptr(), storage.nbytes()
        if key not in self._holders:
            self._holders[key] = 0
            self.live += nbytes
            self.peak = max(self.peak, self.live)
        self._holders[key] += 1
        weakref.finalize(tensor, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.live -= nbytes
