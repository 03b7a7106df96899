"""Programs of Hugging Face over ZeRO: PEFT beside one process, and a model that something else
wraps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import full

pytestmark = pytest.mark.cpu_only
VOCABULARY, LENGTH = 50, 8


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def _rows(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(step))


class _Within(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def _loss(logits: Tensor, x: Tensor) -> Tensor:
    """As transformers', which computes it in float32 whatever the model is: a mean of two such
    losses is rounded otherwise."""
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), x[:, 1:].reshape(-1))


def _wrapped(rank: int, group: Any, stage: int) -> list[str]:
    """What DistributedDataParallel says to a model and to one that contains it; it takes the model
    after close()."""
    model = nn.Linear(3, 3)
    zero, found = (
        ZeroOptimizer(model, torch.optim.SGD, ZeroConfig(stage=stage), group=group, lr=0.1),
        [],
    )
    with zero.whole_parameters():
        for each in (model, _Within(model)):
            try:
                wrapper = nn.parallel.DistributedDataParallel(each, process_group=group)
                found.append("made")
                wrapper(torch.ones(1, 3))
            except RuntimeError as error:
                found.append(str(error))
    zero.close()
    nn.parallel.DistributedDataParallel(model, process_group=group)(torch.ones(1, 3))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_within_ddp_is_refused(world, stage: int):
    """When the wrapper is made, or where it is of another module, when it computes."""
    for refused, made, computing in world(2).run(_wrapped, stage):
        assert "pyops.hf.ZeroTrainer" in refused
        assert made == "made"
        assert "pyops.hf.ZeroTrainer" in computing


def _peft(rank: int, group: Any, dora: bool) -> list[list[float]]:
    """Losses of the whole batch, on one process and at stages 1 to 3, in float64."""
    from peft import LoraConfig, get_peft_model

    size, found = dist.get_world_size(group), []
    for stage in (0, 1, 2, 3):
        model = _gpt2()
        torch.manual_seed(1)
        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=["c_attn"], use_dora=dora, fan_in_fan_out=True)
        ).double()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=3e-2)
        if stage:
            optimizer = ZeroOptimizer(
                model, torch.optim.AdamW, ZeroConfig(stage=stage), group=group, lr=3e-2
            )
        losses = []
        for step in range(4):
            x = _rows(step).chunk(size)[rank] if stage else _rows(step)
            loss = _loss(model(input_ids=x).logits, x)
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            told = loss.detach().clone()
            if stage:
                dist.all_reduce(told, group=group)
            losses.append(float(told) / (size if stage else 1))
        found.append(losses)
        if stage:
            optimizer.close()
    return found


@pytest.mark.parametrize("dora", [False, full(True)], ids=["lora", "dora"])
def test_peft_is_one_process(world, dora: bool):
    pytest.importorskip("peft")
    for plain, *spread in world(2).run(_peft, dora, timeout=240.0):
        assert plain[0] != plain[-1]
        for losses in spread:
            assert losses == pytest.approx(plain, rel=1e-12)
