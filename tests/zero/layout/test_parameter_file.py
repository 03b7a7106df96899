"""Stage 3's parameters in files: the same bits, two blocks and a few shards of memory, read before
they are needed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.compression.eight_bit import Int8
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from pyops.zero.layout import parameter_file
from pyops.zero.layout.parameter_file import FileSlice
from tests.grids import full
from tests.zero.making import zero_optimizer
from tests.zero.models import Net, groups, mean_loss, part

WIDTH, LAYERS = 128, 8
Parameters = dict[str, Tensor]


def _train(
    rank: int, group: Any, offload: str | None, zero: dict[str, Any], name: str, small: bool
) -> Parameters:
    """Steps with everything that looks at parameters in between."""
    dtype = torch.bfloat16 if name == "torch.AdamW" else torch.float32
    model, cls = (
        Net(seed=rank, mixed=False).to(dtype),
        torch.optim.AdamW if name == "torch.AdamW" else AdamW,
    )
    if small:
        zero = {**zero, "secondary_group": group}
    optimizer = zero_optimizer(
        model,
        cls,
        stage=3,
        offload=offload or "none",
        max_grad_norm=0.5,
        group=group,
        params=groups(model),
        lr=1e-2,
        **zero,
    )
    assert (offload is not None) == all(
        f.region is not None for unit in optimizer.gathering.units for f in unit.flats
    )
    for step in range(7):
        x, y = (t.to(dtype) for t in part(step, rank, dist.get_world_size(group)))
        if step == 2:  # an evaluation, whose read-ahead is of old values when the step comes
            with torch.no_grad():
                model(x)
        mean_loss(model, x, y, sometimes=step % 2 == 0).backward()
        if step == 3:
            model(x)
        optimizer.step()
        if step == 1:
            with optimizer.whole_parameters(), torch.no_grad():
                model.blocks[1].inner.weight.mul_(1.5)
            optimizer.refresh_masters()
        if step == 4:  # its own state, changed and put back
            state = copy.deepcopy(optimizer.model_state_dict())
            states = optimizer.state_dict()
            with optimizer.whole_parameters(), torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            optimizer.load_model_state_dict(state)
            if dist.get_world_size(group) == 1:
                optimizer.load_state_dict(states)
    with optimizer.whole_parameters():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


CASES: list[tuple[int, dict[str, Any], str, bool]] = [
    (1, {}, "AdamW", False),
    (2, {"overlap_grad_reduce": False}, "AdamW", False),
    (3, {"whole_below": 20}, "torch.AdamW", False),
    (2, {"gather_codec": Int8()}, "AdamW", True),
]


# Three ranks with whole parameters beside, and a codec; the second lacks the overlap of these.
@pytest.mark.parametrize("case", [full(0), full(1), 2, 3])
def test_the_same_bits_as_in_memory(world, tmp_path: Path, case: int):
    size, zero, name, small = CASES[case]
    if "whole_below" in zero:
        zero = {**zero, "units": None}
    expected = world(size).run(_train, None, zero, name, small)[0]
    start = Net(mixed=False).state_dict()
    assert sum(float((p.float() - start[n]).abs().max()) > 1e-2 for n, p in expected.items()) > 7
    for found in world(size).run(_train, str(tmp_path), zero, name, small):
        for n, p in expected.items():
            assert torch.equal(found[n], p), n
    assert not list(tmp_path.iterdir()), "files have no name"


def _memory(rank: int, group: Any, folder: str) -> tuple[dict[str, int], list[bool], int]:
    """(the most bytes of parameters in memory by phase, whether reads in the last forward had begun
    early, bytes of a block)"""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16()
    most: dict[str, int] = {}
    phase, early, units = "made", [], []

    def look(*_: Any) -> None:
        tensors = [t for t in net.parameters() if not t.is_meta]
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*tensors, *units)
        }
        storages.pop(0, None)
        most[phase] = max(most.get(phase, 0), sum(storages.values()))

    def initialise(module: nn.Linear) -> None:
        module.reset_parameters()
        look()

    with pytest.MonkeyPatch.context() as patch:
        load, place = FileSlice.load, parameter_file.ParameterFile.place

        def noted(self: FileSlice) -> Tensor:
            early.append(self.is_there)
            found = load(self)
            look()
            return found

        def placed(self: Any, tensor: Tensor) -> FileSlice:
            units.append(tensor)
            look()
            return place(self, tensor)

        patch.setattr(FileSlice, "load", noted)
        patch.setattr(parameter_file.ParameterFile, "place", placed)
        optimizer = ZeroOptimizer(
            net,
            AdamW,
            ZeroConfig(stage=3, offload=folder, initialize=initialise),
            group=group,
            lr=1e-3,
        )
        for module in net:
            module.register_forward_hook(look)
            module.register_full_backward_hook(look)
        for _ in range(3):
            phase = "trained"
            early.clear()
            loss = net(torch.randn(4, WIDTH, requires_grad=True).bfloat16()).square().mean()
            forward = list(early)
            loss.backward()
            phase = "stepped"
            optimizer.step()
    assert optimizer.memory()["parameters"] == 0
    whole = [b.whole for b in optimizer.gradients.buckets]
    assert all(each is None for each in whole)
    return most, forward, (WIDTH * WIDTH + WIDTH) * 2


@pytest.mark.parametrize("size", [1, 2])
def test_no_process_ever_holds_the_model(world, tmp_path: Path, size: int):
    for most, early, block in world(size).run(_memory, str(tmp_path)):
        shard = block / size
        # Whole blocks: the one that computes and the next. Shards: those on their way from the
        # file.
        assert block <= most["made"] <= 2.1 * block
        assert block <= most["trained"] <= (2 * block + 3 * shard if size > 1 else 4 * block) * 1.1
        assert shard <= most["stepped"] <= 3 * shard * 1.1
        assert len(early) == LAYERS
        assert sum(early) >= LAYERS - 2, "the order of the last time is read ahead"


def _no_room(rank: int, group: Any, folder: str) -> tuple[str, bool]:
    model = Net(mixed=False)
    start = model.first.weight.data_ptr()
    with pytest.MonkeyPatch.context() as patch:

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device", folder)

        if rank == 1:
            patch.setattr(parameter_file, "AsyncFile", full)
        try:
            ZeroOptimizer(model, AdamW, ZeroConfig(stage=3, offload=folder), group=group, lr=1e-3)
        except OSError as error:
            return str(error), model.first.weight.data_ptr() == start
    return "", False


def test_a_disk_without_room_on_one_rank_is_said_on_all(world, tmp_path: Path):
    for said, unchanged in world(2).run(_no_room, str(tmp_path)):
        assert "No space left" in said
        assert unchanged
