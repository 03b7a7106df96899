"""Models of other libraries on 1, 2 and 4 ranks: outputs, every gradient, steps with ZeRO on a
grid, and what is sent."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.flat import Placement
from pyops.mesh import Axes, Mesh
from pyops.tensor_parallel import parallelize, sync_partial_grads, whole_state_dict
from tests.grids import full
from tests.tensor_parallel.convert.existing_models import MODELS, PLAN, build

pytestmark = pytest.mark.on_device

BOUND = 1e-11
SLOW = 240.0  # seconds; importing transformers on a busy machine
WITHOUT_BLOCKS = {"own"}


def as_cut(model: nn.Module, name: str, whole: Tensor, place: Placement) -> Tensor:
    """A parameter of the model before, or its gradient, laid out as the parallel one."""
    owner, _, last = name.rpartition(".")
    if type(model.get_submodule(owner)).__name__ == "Conv1D" and last == "weight":
        whole = whole.t()
    return whole.reshape(place.global_shape)


@torch.no_grad()
def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference in units of the largest number."""
    return float((a - b).abs().max() / b.abs().max())


def differences(
    rank: int, group: dist.ProcessGroup, size: int, names: list[str], sp: bool
) -> dict[str, dict[str, float]]:
    """On groups of `size` of the four ranks, so that one pool serves all: importing transformers
    takes seconds."""
    mesh = Mesh(Axes(dp=4 // size, tp=size))
    return {name: differences_of(mesh.group("tp"), name, sp) for name in names}


def differences_of(group: dist.ProcessGroup | None, name: str, sp: bool) -> dict[str, float]:
    """{what: largest difference from the model before, in units of its largest number}, in
    float64."""
    before, inputs = build(name)
    before = before.double()
    inputs = {
        key: value.double() if value.is_floating_point() else value for key, value in inputs.items()
    }
    model = copy.deepcopy(before)
    report = parallelize(
        model, group=group, plan=PLAN if name == "own" else None, sequence_parallel=sp, check=False
    )
    whole = whole_state_dict(model, group=group)
    for (n, value), (m, reference) in zip(whole.items(), before.state_dict().items(), strict=True):
        assert n == m
        assert torch.equal(value, reference), n
    outputs = []
    for each in (before, model):
        outputs.append(each(**inputs))
        outputs[-1].loss.backward()
    sync_partial_grads(model, group=group)
    ranks = 1 if group is None else dist.get_world_size(group)
    gradients = {n: p.grad for n, p in before.named_parameters()}
    scale = max(float(g.abs().max()) for g in gradients.values())
    found = {"logits": relative(outputs[1].logits, outputs[0].logits)}
    placements = Placement.of(model)
    assert [n for n, _ in model.named_parameters()] == list(gradients)
    for n, p in model.named_parameters():
        place = placements.get(n) or Placement.whole(p.shape, rank=0, ranks=1)
        reference = as_cut(before, n, gradients[n], place)
        # A key's bias moves all scores of a query alike: its gradient is zero but for rounding.
        assert reference.abs().max() > 1e-5 * scale or "key.bias" in n or "k_proj.bias" in n, n
        unit = max(float(reference.abs().max()), 1e-3 * scale)
        found[n] = float((p.grad - place.take(reference)).abs().max()) / unit
    assert report.elements[0] == sum(p.numel() for p in before.parameters())
    if ranks > 1:
        assert report.elements[1] < 0.8 * report.elements[0]
        assert sum(place.dim is not None for place in placements.values()) > 8
    return found


# One rank, which cuts nothing, has the sums of four of which nothing is added.
@pytest.mark.parametrize(
    ("size", "sp"),
    [(4, False), *(full(*each) for each in ((1, False), (2, False), (2, True), (4, True)))],
)
def test_logits_and_gradients_are_those_of_one_rank(world, size: int, sp: bool):
    names = [name for name in MODELS if not (sp and name in WITHOUT_BLOCKS)]
    for of_rank in world(4).run(differences, size, names, sp, timeout=SLOW):
        assert len(of_rank) == len(names)
        for name, found in of_rank.items():
            worst = max(found, key=found.__getitem__)
            bound = (
                1e-6 if name == "qwen3" else BOUND
            )  # its norm of a head rounds to float32, and so a part of a gradient
            assert found[worst] <= bound, (name, worst, found[worst])
