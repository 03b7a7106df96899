"""A model whose layers lie on a grid of ranks is written as the file of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pyops import hub
from pyops.models import GPT, GPTConfig
from pyops.tensor_parallel.grids import Grid
from tests.grids import full

pytestmark = pytest.mark.cpu_only

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False}
CONFIG = GPTConfig(
    vocab_size=48, sequence_length=8, num_layers=2, num_heads=4, dim=32, tied_head=False, **LLAMA
)


def write_from_grid(rank: int, group: dist.ProcessGroup, mode: str, folder: Path) -> list[str]:
    model = GPT(CONFIG, group=Grid.of(group, mode=mode), seed=3)
    return hub.save(model, folder, group=group)


@pytest.mark.parametrize(("ranks", "mode"), [(4, "2d"), full(8, "2.5d"), full(8, "3d")])
def test_a_grid_writes_the_file_of_one_process(world, tmp_path, ranks, mode):
    hub.save(GPT(CONFIG, seed=3), tmp_path / "one")
    files = world(ranks).run(write_from_grid, mode, tmp_path / "grid")
    assert files == [["config.json", "model.safetensors"]] * ranks
    one, grid = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "grid"))
    assert one.keys() == grid.keys()
    assert len(one) > 10
    for name, value in one.items():
        assert torch.equal(grid[name], value), name
    texts = [(tmp_path / name / "config.json").read_text() for name in ("one", "grid")]
    assert texts[0] == texts[1]
