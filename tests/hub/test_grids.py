"""A model whose layers lie on a grid of ranks is written as the file of one process, and read from
it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from pyops import hub
from pyops.models import BERT, GPT, BERTConfig, GPTConfig, ViT, ViTConfig
from pyops.tensor_parallel.grids import Grid
from tests.grids import full

pytestmark = pytest.mark.cpu_only

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False}
CONFIG = GPTConfig(
    vocab_size=48, sequence_length=8, num_layers=2, num_heads=4, dim=32, tied_head=False, **LLAMA
)


IMAGES = ViTConfig(
    num_labels=5,
    image_size=8,
    patch_size=4,
    num_channels=2,
    num_layers=2,
    num_heads=4,
    dim=20,
    hidden=30,
)


def write_from_grid(rank: int, group: dist.ProcessGroup, mode: str, folder: Path) -> list[str]:
    model = GPT(CONFIG, group=Grid.of(group, mode=mode), seed=3)
    return hub.save(model, folder, group=group)


def read_to_grid(rank: int, group: dist.ProcessGroup, mode: str, folder: Path) -> list[Tensor]:
    """Of each model, what it makes of its input, and how many numbers this rank holds."""
    grid, found = Grid.of(group, mode=mode), []
    for name, x in INPUTS.items():
        model = hub.load(folder / name, group=grid)
        with torch.no_grad():
            found += [model(x), torch.tensor(sum(p.numel() for p in model.parameters()))]
    with pytest.raises(TypeError, match="group is Grid"):
        hub.load(folder / "bert", group=grid)
    return found


INPUTS = {
    "gpt": torch.arange(16).view(2, 8),
    "vit": torch.linspace(-1, 1, 3 * 2 * 64).view(3, 2, 8, 8),
}


@pytest.mark.parametrize(("ranks", "mode"), [(4, "2d"), full(8, "2.5d"), full(8, "3d")])
def test_a_grid_reads_the_file_of_one_process(world, tmp_path, ranks, mode):
    models = {"gpt": GPT(CONFIG, seed=3), "vit": ViT(IMAGES, seed=4)}
    for name, model in models.items():
        with torch.no_grad():  # biases and norms other than they begin
            for p in model.parameters():
                p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        hub.save(model.eval(), tmp_path / name)
    hub.save(BERT(BERTConfig(vocab_size=16, num_layers=1, num_heads=1, dim=8)), tmp_path / "bert")
    found = world(ranks).run(read_to_grid, mode, tmp_path)
    for at, (name, model) in enumerate(models.items()):
        with torch.no_grad():
            expected = model(INPUTS[name])
        for each in found:
            torch.testing.assert_close(each[2 * at], expected, rtol=1e-4, atol=1e-5)
            assert each[2 * at + 1] < sum(p.numel() for p in model.parameters())


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
