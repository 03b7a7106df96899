"""What parallel layers keep for backward, in bytes, against the formulas; and recomputed, with
dropout, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.parallel.tensor.bench_activations import SCHEMES, Sizes, measure
from pyops import recompute
from pyops.models.gpt import GPT, GPTConfig
from pyops.tensor_parallel import Dropout, set_dropout, sync_partial_grads
from tests.grids import full

pytestmark = pytest.mark.cpu_only

SIZES = (Sizes(b=2, s=32, h=64, a=4), Sizes(b=3, s=16, h=32, a=4))


def kept(rank: int, group: dist.ProcessGroup | None) -> dict[str, list[int]]:
    return {
        name: [measure(scheme, sizes, group=group) for sizes in SIZES]
        for name, scheme in SCHEMES.items()
    }


@pytest.mark.parametrize("size", [1, 2])
def test_kept_bytes_are_those_of_the_formulas(world, size: int):
    for found in world(size).run(kept) if size > 1 else [kept(0, None)]:
        for name, scheme in SCHEMES.items():
            for sizes, measured in zip(SIZES, found[name], strict=True):
                assert measured == pytest.approx(scheme.ours(sizes, size), rel=0.02), name
                if scheme.megatron is not None and not scheme.recomputed:
                    assert measured < scheme.megatron(sizes, size), name


CONFIG = GPTConfig(
    vocab_size=13,
    sequence_length=6,
    num_layers=2,
    num_heads=2,
    dim=8,
    dropout=0.3,
    attention_dropout=0.2,
)
CHOICES: dict[str, tuple[list[str], bool]] = {
    "core": (["blocks.*.attention.core"], False),
    "attention, MLP and norms": (["blocks.*.attention", "blocks.*.mlp", "blocks.*.norm1"], False),
    "blocks": (["blocks.*"], False),
    "blocks, inputs split": (["blocks.*"], True),
    "everything": (["embedding", "blocks.*", "head"], False),
}


def gradients(group: dist.ProcessGroup | None, sp: bool, choice: str | None) -> list[Tensor]:
    """Of two micro-batches, both forwards first: each has dropout of its own, drawn again in
    backward."""
    model = GPT(CONFIG, group=group, sequence_parallel=sp)
    if choice is not None:
        modules, split = CHOICES[choice]
        recompute.apply(model, modules, partition_group=group if split else None)
    losses = []
    for row in (0, 3):
        model.set_dropout((3, 5), seed=1, step=0, first_row=row)
        tokens = torch.randint(0, 13, (3, 6), generator=torch.Generator().manual_seed(row))
        losses.append(model(tokens[:, :-1], tokens[:, 1:]))
    for loss in losses:
        loss.backward()
    sync_partial_grads(model, group=group)
    found = [p.grad for p in model.parameters()]
    assert all(g.abs().max() > 0 for g in found)
    return found


def recomputed(rank: int, group: dist.ProcessGroup | None) -> None:
    for sp in (False, True):
        plain = gradients(group, sp, None)
        for choice, (_, split) in CHOICES.items():
            if sp and split:
                continue  # a rank's rows are its own
            for ours, theirs in zip(gradients(group, sp, choice), plain, strict=True):
                assert torch.equal(ours, theirs), (choice, sp)


@pytest.mark.parametrize("size", [full(1), 2])
def test_recomputation_with_dropout_changes_no_bit(world, size: int):
    if size > 1:
        world(size).run(recomputed)
    else:
        recomputed(0, None)


def test_a_recomputed_module_leaves_a_later_state_alone():
    model = nn.Sequential(nn.Linear(4, 4), Dropout(0.5, width=4))
    set_dropout(model, seed=1, step=0, shape=(2, 3))
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = recompute.checkpoint(model, x)
    set_dropout(model, seed=1, step=1, shape=(2, 3))
    later = model[1].state
    y.sum().backward()
    assert model[1].state is later
    assert ((x.grad @ model[0].weight.inverse()).abs() > 1e-4).equal(
        y != 0
    )  # where the first state let pass
