"""torch.distributed.checkpoint of models under FSDP2 with the fused optimizers: other numbers of
ranks, and torch.optim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from pyops.optim import AdamW
from tests.optim.pairs import HYPER
from tests.optim.test_fsdp import CASES, Net, give, sharded, whole

SAVED = ("amsgrad", "nesterov", "lion", "adagrad", "adafactor")


def _resharded(rank: int, group: Any, path: str, first: int, load: bool) -> dict[str, list[Tensor]]:
    """Two steps of each optimizer, from torch's checkpoint of another number of ranks to one of
    this."""
    made, states = {}, {}
    for name in SAVED:
        make, _, options = CASES[name]
        net = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
        made[name] = net, make(net.parameters(), **options)
        states[name] = (
            dict(zip(("model", "optim"), get_state_dict(*made[name]), strict=True)) if load else {}
        )
    if load:
        dcp.load(states, checkpoint_id=path)
    for name, (net, optimizer) in made.items():
        if load:
            loaded = states[name]
            set_state_dict(
                net, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"]
            )
        for step in range(first, first + 2):
            give(net, step)
            optimizer.step()
        states[name] = dict(zip(("model", "optim"), get_state_dict(net, optimizer), strict=True))
    dcp.save(states, checkpoint_id=path)
    return {name: [whole(p) for p in net.parameters()] for name, (net, _) in made.items()}


def test_torchs_checkpoints_go_from_two_ranks_to_one_and_back(world, tmp_path):
    world(2).run(_resharded, str(tmp_path), 0, False)
    world(1).run(_resharded, str(tmp_path), 2, True)
    found, other = world(2).run(_resharded, str(tmp_path), 4, True)
    for name in SAVED:
        make, _, options = CASES[name]
        net = Net()
        optimizer = make(net.parameters(), **options)
        for step in range(6):
            give(net, step)
            optimizer.step()
        for mine, theirs, right in zip(found[name], other[name], net.parameters(), strict=True):
            assert torch.equal(mine, theirs), name
            if name == "adafactor":  # sums over ranks are in another order
                torch.testing.assert_close(mine, right.detach(), rtol=1e-6, atol=1e-6, msg=name)
            else:
                assert torch.equal(mine, right.detach()), name


def _whole_state_goes_to_torch(rank: int, group: Any) -> dict[str, Any]:
    net = sharded(init_device_mesh("cpu", (2,)))
    optimizer = AdamW(net.parameters(), **HYPER)
    for step in range(2):
        give(net, step)
        optimizer.step()
    state = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    with pytest.raises(
        ValueError,
        match=r"is a plain tensor, the parameter a DTensor placed .*set_optimizer_state_dict",
    ):
        optimizer.load_state_dict(
            {
                **optimizer.state_dict(),
                "state": {
                    0: {"step": 2.0, "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
                },
            }
        )
    fresh = AdamW(net.parameters(), **HYPER)
    net.zero_grad()  # or torch makes no states to fill
    set_optimizer_state_dict(
        net, fresh, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    for p in net.parameters():
        assert torch.equal(whole(fresh.state[p]["exp_avg"]), whole(optimizer.state[p]["exp_avg"]))
        assert fresh.state[p]["step"] == 2
    return state


def test_a_whole_state_is_that_of_torchs_adamw(world):
    found, _ = world(2).run(_whole_state_goes_to_torch)  # DCP gives rank 0 the whole one
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), **HYPER)
    for step in range(2):
        give(net, step)
        optimizer.step()
    theirs = get_optimizer_state_dict(net, optimizer)
    assert found["state"].keys() == theirs["state"].keys()
    for name, entries in theirs["state"].items():
        for entry in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(found["state"][name][entry], entries[entry])
