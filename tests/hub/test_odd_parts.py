"""hub.save over ranks, of which one has a parameter that is no part of the whole: all ranks raise,
and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pyops import hub
from pyops.models import GPT, GPTConfig

pytestmark = pytest.mark.cpu_only

CONFIG = GPTConfig(
    vocab_size=12, sequence_length=4, num_layers=1, num_heads=2, dim=8, tied_head=False
)


def _emptied(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


ODD = {
    "another shape": lambda t: t[:, :-1].clone(),
    "no elements": lambda t: t[:0].clone(),
    "another dtype": lambda t: t.double(),
    "sparse": lambda t: t.to_sparse(),
    "without memory": _emptied,
}


def _saved(rank: int, group: Any, folder: Path, case: str | None) -> str:
    model = GPT(CONFIG, seed=1, group=group)
    down: Any = model.blocks[0].mlp.down
    if rank == 1 and case is not None:
        whole = down.weight.detach()
        down.weight = nn.Parameter(
            torch._neg_view(-whole) if case == "negative view" else ODD[case](whole)
        )
    try:
        hub.save(model, folder, group=group)
    except hub.HubError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("case", list(ODD))
def test_a_part_that_does_not_fit_is_refused_on_all_ranks(world, tmp_path, case: str):
    said = world(2).run(_saved, tmp_path / "model", case)
    assert all("blocks.0.mlp.down.weight" in each for each in said), said
    assert not (tmp_path / "model").exists()


def test_a_negative_view_is_written_with_its_sign(world, tmp_path):
    for case in (None, "negative view"):
        assert world(2).run(_saved, tmp_path / str(case), case) == ["saved"] * 2
    plain, negative = (
        load_file(tmp_path / case / "model.safetensors") for case in ("None", "negative view")
    )
    assert all(torch.equal(plain[name], negative[name]) for name in plain)
    assert plain["transformer.h.0.mlp.c_proj.weight"].abs().max() > 0
