"""A parallel GPT-2 trained with ZeRO on a grid, its collectives counted, its logits left in parts,
a text generated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops import recompute
from pyops.comm import Communicator
from pyops.flat import Placement
from pyops.mesh import Axes, Mesh
from pyops.optim import AdamW
from pyops.tensor_parallel import parallelize, sync_partial_grads
from pyops.tensor_parallel.functional.losses.cross_entropy import vocab_parallel_cross_entropy
from tests.tensor_parallel.convert.existing_models import V, build
from tests.tensor_parallel.convert.test_parallelize import SLOW, as_cut
from tests.tensor_parallel.shared_layers import configured
from tests.zero.making import zero_optimizer

pytestmark = pytest.mark.on_device

STEPS = 10
OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1, "max_grad_norm": 0.5}


def batch(step: int) -> Tensor:
    return torch.randint(0, V, (4, 7), generator=torch.Generator().manual_seed(100 + step))


def train(model: nn.Module, optimizer: Any, part: int, parts: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        tokens = batch(step).chunk(parts)[part]
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_grid(
    rank: int, group: dist.ProcessGroup, stage: int, sp: bool
) -> tuple[list[float], list[float], float]:
    """(losses of this rank's part of the batch, of one process, largest difference between the
    parameters in the end)."""
    mesh = Mesh(Axes(dp=2, tp=2))
    alone, _ = build("gpt2", spread=0.1)
    model = copy.deepcopy(alone)
    first = copy.deepcopy(alone.state_dict())
    parallelize(model, group=mesh.group("tp"), sequence_parallel=sp, check=False)
    optimizer = zero_optimizer(
        model, AdamW, stage=stage, group=mesh.group("dp"), tp_group=mesh.group("tp"), **OPTIONS
    )
    losses = train(model, optimizer, mesh.rank("dp"), 2)
    expected = train(alone, AdamW(alone.parameters(), **OPTIONS), 0, 1)
    worst, placements = 0.0, Placement.of(model)
    with optimizer.whole_parameters(), torch.no_grad():
        for name, p in model.named_parameters():
            place = placements.get(name) or Placement.whole(p.shape, rank=0, ranks=1)
            whole = alone.get_parameter(name)
            assert not torch.equal(whole, first[name]), "training takes place"
            worst = max(
                worst, float((place.take(as_cut(alone, name, whole, place)) - p).abs().max())
            )
    return losses, expected, worst


@pytest.mark.parametrize(("stage", "sp"), [(1, True), (3, False)])
def test_a_grid_with_zero_trains_as_one_process(world, stage: int, sp: bool):
    results = world(4).run(on_grid, stage, sp, timeout=SLOW)
    for losses, expected, worst in results:
        other = next(each for each, _, _ in results if each != losses)
        together = [(a + b) / 2 for a, b in zip(losses, other, strict=True)]
        assert together == pytest.approx(expected, rel=1e-5)
        assert expected[-1] != expected[0]
        assert worst <= 1e-5


def counted(rank: int, group: dist.ProcessGroup, sp: bool) -> tuple[int, int]:
    """Collectives of a forward, and of a backward."""
    tp = Mesh(Axes(dp=2, tp=2)).group("tp")
    model, inputs = build("gpt2")
    parallelize(model, group=tp, sequence_parallel=sp, check=False)
    model(**inputs).loss.backward()  # what only a group's first collectives do is done
    comm = Communicator.of(tp)
    start = comm.sequence
    loss = model(**inputs).loss
    middle = comm.sequence
    loss.backward()
    return middle - start, comm.sequence - middle


def test_collectives(world):
    """Of 2 layers: two sums each way; besides, one for the embedding, one gather of logits, one sum
    of their input's gradient.

    Sequence parallel, each sum is a scatter and a gather; the tokens are gathered once more at the
    end of the blocks, and forward's gather for the MLP is repeated in backward, where only the rows
    were kept.
    """
    assert world(4).run(counted, False, timeout=SLOW) == [(2 * 2 + 2, 2 * 2 + 1)] * 4
    assert world(4).run(counted, True) == [(4 * 2 + 3, 5 * 2 + 2)] * 4


def used(rank: int, group: dist.ProcessGroup) -> None:
    tp = Mesh(Axes(dp=2, tp=2)).group("tp")
    model, inputs = build("gpt2")
    tokens, before = inputs["input_ids"], copy.deepcopy(model)
    parts = copy.deepcopy(model)
    parallelize(parts, group=tp, gather_logits=False, check=False)
    own = parts(tokens).logits
    assert own.shape[-1] == (V + 1) // 2
    loss = configured(
        vocab_parallel_cross_entropy,
        own[:, :-1].flatten(0, 1),
        tokens[:, 1:].flatten(),
        group=tp,
        vocab_size=V,
    )
    loss.backward()
    expected = before(tokens, labels=tokens)
    expected.loss.backward()
    torch.testing.assert_close(loss, expected.loss)
    place = Placement.of(parts)["transformer.wte.weight"]
    torch.testing.assert_close(
        parts.transformer.wte.weight.grad, place.take(before.transformer.wte.weight.grad)
    )

    report = parallelize(model, group=tp, sequence_parallel=True)
    assert "transformer.h.*.attn: num_heads 4 -> 2" in str(report)
    assert report.replicated[:2] == ["transformer.wpe.weight", "transformer.h.0.ln_1.weight"]
    twin = copy.deepcopy(model)  # whose hooks are its own
    twin(tokens[:, :3])
    model(tokens, labels=tokens).loss.backward()
    sync_partial_grads(model, group=tp)
    torch.testing.assert_close(
        model.transformer.h[0].ln_1.weight.grad, before.transformer.h[0].ln_1.weight.grad
    )
    texts = [
        each.eval().generate(tokens[:, :3], max_new_tokens=4, do_sample=False, use_cache=True)
        for each in (before, twin)
    ]
    assert torch.equal(*texts)


def test_logits_in_parts_and_generation(world):
    world(4).run(used, timeout=SLOW)


def recomputed(rank: int, group: dist.ProcessGroup) -> None:
    tp = Mesh(Axes(dp=2, tp=2)).group("tp")
    found = []
    for choice in (None, "*.block.*", "*.block.*.layer.*"):
        model, inputs = build("t5", dropout=0.1)
        parallelize(model, group=tp, sequence_parallel=True, check=False)
        if choice:
            recompute.apply(model, choice)
        torch.manual_seed(1)
        model(**inputs).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for gradients in found[1:]:
        assert all(
            torch.equal(a, b) and a.abs().max() > 0
            for a, b in zip(gradients, found[0], strict=True)
        )


def test_blocks_are_recomputed_to_the_bit(world):
    world(4).run(recomputed, timeout=SLOW)


def evaluated(rank: int, group: dist.ProcessGroup | None) -> None:
    """torch.nn.TransformerEncoder has a path of its own then, past its layers, by their whole
    weights."""
    before, inputs = build("torch.nn")
    model = copy.deepcopy(before)
    parallelize(model, group=group, example_inputs=inputs)
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval()(**inputs).logits, before.eval()(**inputs).logits, rtol=1e-4, atol=1e-5
        )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_evaluation_of_torchs_own_layers(world):
    evaluated(0, None)
    world(2).run(evaluated)
