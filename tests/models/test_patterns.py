"""Models with a sparse pattern, and with documents in a row: what a token sees, on every layout,
and whatever the length."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from pyops import recompute
from pyops.attention import BigBird, document_ids, interpolate_positions
from pyops.attention.layouts import shared_layouts
from pyops.mesh import ALONE
from pyops.models import BERT, GPT, BERTConfig, GPTConfig
from tests.models.families import FAMILIES
from tests.square_tensors import SquareTensors

pytestmark = pytest.mark.cpu_only

SIZES: dict[str, Any] = {
    "vocab_size": 19,
    "sequence_length": 80,
    "num_layers": 2,
    "num_heads": 4,
    "dim": 16,
    "pattern": "SlidingWindow(num_sliding_window_blocks=1)",
    "pattern_block": 16,
}


def varied(model: Any) -> Any:
    """In float64, with weights that are far from 0, so that attention matters."""
    model = model.double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * drawn)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(19, shape, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_token_of_a_gpt_sees_its_blocks(positions: str):
    """Two layers of a window of one block: a change is seen within the block, and nowhere else."""
    model = varied(GPT(GPTConfig(positions=positions, **SIZES), seed=1)).eval()
    given = tokens(1, 70)
    other = given.clone()
    other[0, 37] = (other[0, 37] + 1) % 19
    changed = (model(given) != model(other)).any(-1)[0].nonzero()[:, 0].tolist()
    assert changed == list(range(37, 48))


def test_a_token_of_a_bert_sees_its_blocks():
    config = BERTConfig(pooled_head=False, **SIZES)
    model = varied(BERT(config, seed=1)).eval()
    given = tokens(1, 70)
    other = given.clone()
    other[0, 37] = (other[0, 37] + 1) % 19
    changed = (model(given) != model(other)).any(-1)[0].nonzero()[:, 0].tolist()
    assert changed == list(range(32, 48))


def test_tokens_one_at_a_time_see_what_they_see_together():
    pattern = "BigBird(num_random_blocks=2, different_layout_per_head=True)"
    config = GPTConfig(**{**SIZES, "pattern": pattern, "num_kv_heads": 2})
    model = varied(GPT(config, seed=1)).eval()
    given = tokens(2, 50)
    past = model.new_kv_caches()
    with torch.no_grad():
        parts = [model(given[:, :14], past=past)]
        parts += [model(given[:, i : i + 1], past=past) for i in range(14, 50)]
        torch.testing.assert_close(torch.cat(parts, 1), model(given), rtol=1e-12, atol=1e-12)
        dense = varied(GPT(dataclasses.replace(config, pattern=""), seed=1)).eval()
        assert not torch.allclose(dense(given), model(given))


def losses_and_gradients(model: Any, group: Any, **named: Any) -> dict[str, Tensor]:
    """Of one step with dropout; gradients of the parameters that are cut by no rank."""
    model.train()
    model.set_dropout((2, 80), seed=3, step=1)
    given = tokens(2, 81)
    loss = model.loss(given[:, :-1], given[:, 1:], **named)
    loss.backward()
    found = {"loss": loss.detach()}
    for name in ("blocks.0.norm1.weight", "blocks.1.norm2.weight"):
        found[name] = model.get_parameter(name).grad
    return found


PATTERN = str(BigBird(2, 1, num_global_blocks=0, different_layout_per_head=True, seed=5))


def step_of(rank: int, group: Any, sequence_parallel: bool, again: bool) -> dict[str, Tensor]:
    config = GPTConfig(
        **{**SIZES, "pattern": PATTERN}, attention_dropout=0.3, dropout=0.1, positions="rotary"
    )
    sp = sequence_parallel and group is not ALONE
    model = GPT(config, group=group, sequence_parallel=sp, seed=1, dtype=torch.float64)
    if again:
        recompute.apply(model, ["blocks.*.attention.core"])
    ids = document_ids(torch.tensor([0, 30, 41, 77]), length=80).expand(2, -1)
    return losses_and_gradients(model, group, documents_BT=ids)


def test_ranks_see_the_pattern_of_their_heads(world):
    """Heads differ, weights are dropped, documents are packed, cores are recomputed."""
    alone = step_of(0, ALONE, False, False)
    for sequence_parallel in (False, True):
        for found in world(2).run(step_of, sequence_parallel, True):
            for name in ("loss",) if sequence_parallel else alone:
                torch.testing.assert_close(found[name], alone[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_documents_give_the_loss_of_one_by_one(positions: str):
    """One of them has a single token, and behind the last one there is padding."""
    config = GPTConfig(**{**SIZES, "pattern": ""}, positions=positions)
    model = varied(GPT(config, seed=1))
    starts = torch.tensor([0, 23, 24, 61])
    given = tokens(1, 80)
    ids = document_ids(starts, length=80)
    targets = torch.full((1, 80), -100)
    one_by_one = 0.0
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        targets[0, start : end - 1] = given[0, start + 1 : end]
        if end - start > 1:
            one = given[:, start:end]
            one_by_one = one_by_one + model.loss(one[:, :-1], one[:, 1:], reduction="sum")
    packed = model.loss(given, targets, documents_BT=ids[None], reduction="sum")
    parameters = list(model.parameters())
    found, wanted = (
        torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (packed, one_by_one)
    )
    torch.testing.assert_close(packed, one_by_one, rtol=1e-12, atol=0)
    for name, a, b in zip(dict(model.named_parameters()), found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    assert not torch.allclose(packed, model.loss(given, targets, reduction="sum"))


def test_documents_that_are_refused():
    model = GPT(GPTConfig(**SIZES))
    given = tokens(2, 20)
    for named, words in (
        (
            {"documents_BT": torch.zeros(20, dtype=torch.int32)},
            r"documents_BT is .*\[20\]; it must",
        ),
        ({"documents_BT": torch.zeros(2, 20)}, r"must be torch.int32 \[2, 20\]"),
        ({"positions_BT": torch.zeros(2, 20)}, r"positions_BT is torch.float32"),
        (
            {"documents_BT": torch.zeros(2, 20, dtype=torch.int32), "past": model.new_kv_caches()},
            "leave them out with past=",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            model(given, **named)


def test_configurations_with_a_pattern():
    """A pattern may be given itself; equal patterns are equal texts; what can't be is refused."""
    config = GPTConfig(**{**SIZES, "pattern": BigBird()})
    assert config.pattern == str(BigBird())
    assert config == GPTConfig(**{**SIZES, "pattern": "BigBird"})
    assert GPTConfig(**dataclasses.asdict(config)) == config
    for changes, words in (
        ({"pattern": "Bigbird"}, "did you mean BigBird"),
        ({"pattern": "Longformer(global_block_indices=(5,))"}, "global block 5 of a length with 5"),
        ({"pattern": "BigBird(num_random_blocks=6)"}, "num_random_blocks is 6"),
        ({"pattern_block": 20}, "pattern_block is 20; it must be a multiple of 16"),
    ):
        for kind in (GPTConfig, BERTConfig):
            with pytest.raises(ValueError, match=words):
                kind(**{**SIZES, **changes})


def test_longer_positions_of_a_model_with_a_pattern():
    model = GPT(GPTConfig(**{**SIZES, "pattern": "Longformer"}), seed=1)
    with pytest.raises(ValueError, match="longer than sequence_length = 80"):
        model(tokens(1, 160))
    interpolate_positions(model, 160)
    assert model.config.sequence_length == 160
    assert model(tokens(1, 160)).shape == (1, 160, 19)


@pytest.mark.full
@pytest.mark.slow
def test_compiled_blocks_are_one_graph():
    """No graph breaks, though no layout is there yet, and blocks that are alike are one program."""
    shared_layouts.cache_clear()
    config = GPTConfig(**{**SIZES, "pattern": PATTERN})
    model = varied(GPT(config, seed=1))
    given = tokens(2, 80)
    torch._dynamo.reset()
    counters["stats"].clear()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    found = model(given)
    assert counters["stats"]["unique_graphs"] == 1
    for block in model.blocks:
        del block.forward
    torch.testing.assert_close(found, model(given))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_step_makes_scores(name: str):
    """Every tensor of a training step, with dropout, padding, biases by distance and a pattern, is
    smaller than queries x keys. Vision transformers have their number of tokens from the image."""
    length = 97
    kind, config = FAMILIES[name]
    changes: dict[str, Any] = {"attention_dropout": 0.1, "num_layers": 1}
    if hasattr(config, "sequence_length"):
        changes["sequence_length"] = length
    if hasattr(config, "image_size"):
        changes.update(image_size=20, patch_size=2)
        length = 101
    if hasattr(config, "pattern"):
        changes.update(pattern="BigBird", pattern_block=16)
    model = kind(dataclasses.replace(config, **changes), seed=5)
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(5, shape, generator=generator)

    given, targets = drawn(2, length), drawn(2, length)
    with SquareTensors(length) as square:
        if name == "vit":
            model.set_dropout(2, seed=1, step=0)
            loss = model.loss(torch.randn(2, 3, 20, 20), targets[:, 0])
        elif name == "t5":
            model.set_dropout((2, length), (2, length), seed=1, step=0)
            loss = model.loss(given, targets, mask=given != 3)
        else:
            model.set_dropout((2, length), seed=1, step=0)
            named = {"mask": given != 3} if name in ("bert", "roformer") else {}
            loss = model.loss(given, targets, **named)
        loss.backward()
    assert not square.found
    with SquareTensors(length) as square:
        torch.ones(length, 1) @ torch.ones(1, length)
    assert square.found, "the mode sees nothing"
