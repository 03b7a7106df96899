"""A model of transformers that is cut into stages computes what the uncut one does, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.parallel.losses import loss_of
from pyops.parallel.rows.batches import accepted_names, model_arguments
from pyops.parallel.stages.block_lists import find_block_lists
from pyops.parallel.stages.block_record import BlockRecord
from pyops.parallel.stages.block_stages import stage_boundaries
from pyops.parallel.stages.cut_check import backward_in_turn, run_in_turn
from pyops.parallel.stages.layout_trial import find_layout
from pyops.parallel.stages.model_layout import ModelLayout
from pyops.parallel.stages.model_stage import ModelStage, cut_into_stages
from pyops.parallel.stages.placeholder import meta_copy
from pyops.parallel.stages.stage_range import StageRange
from tests.grids import full
from tests.parallel.tiny_transformers import MODELS, batch_for, make_model

pytestmark = pytest.mark.cpu_only
CPU = torch.device("cpu")


def cut(model: nn.Module, boundaries: Sequence[int], own: Sequence[int]) -> list[ModelStage]:
    layout = find_layout(model, find_block_lists(model))
    return cut_into_stages(
        model,
        layout,
        boundaries,
        own,
        shapes=meta_copy(model),
        device=CPU,
        named_arguments=accepted_names(model),
    )


def uncut(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    outputs = model(**model_arguments(batch, accepted_names(model)))
    loss = loss_of(model, None).sum(outputs, batch)
    loss.backward()
    return loss.detach()


def ready(name: str, rows: int = 3) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    model, batch = make_model(name).eval(), batch_for(name, rows=rows)
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    return copy.deepcopy(model), model, batch


@pytest.mark.parametrize("name", list(MODELS))
def test_stages_have_the_loss_and_the_gradients_of_the_uncut_model(name):
    reference, model, batch = ready(name)
    expected = uncut(reference, batch)
    stages = cut(model, [0, 1, 2, 4], range(3))
    outputs, between = run_in_turn(stages, (), model_arguments(batch, accepted_names(model)))
    loss = loss_of(model, None).sum(outputs, batch)
    assert torch.equal(loss.detach(), expected)
    assert expected > 0
    backward_in_turn(loss, between)
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    for key, p in model.named_parameters():
        assert (p.grad is None) == (gradients[key] is None), key
        assert p.grad is None or torch.equal(p.grad, gradients[key]), key


@pytest.mark.parametrize("name", [full("llama"), "llama tied", full("bert"), "t5", full("vit")])
def test_a_rank_keeps_the_parameters_of_its_stages_alone(name):
    whole = {key: p.shape for key, p in make_model(name).named_parameters()}
    kept: list[set[str]] = []
    for rank in range(3):
        model = make_model(name)
        cut(model, [0, 1, 2, 4], [rank])
        kept.append({key for key, _ in model.named_parameters()})
        assert all(whole[key] == p.shape for key, p in model.named_parameters())
        assert not any(p.is_meta for p in model.parameters())
    assert set.union(*kept) == set(whole)
    shared = set.intersection(kept[0], kept[2])
    tied = {
        "llama tied": {"model.embed_tokens.weight"},
        "t5": {"shared.weight"},
        "bert": {"bert.embeddings.word_embeddings.weight"},
    }
    assert shared == tied.get(name, set())
    # The decoder's embedding comes after the last block of the encoder, which is on stage 1.
    assert kept[0] & kept[1] == ({"shared.weight"} if name == "t5" else set())


@pytest.mark.parametrize("name", ["llama tied", "t5", "bert", "gpt2"])
def test_stages_of_one_rank_that_are_no_neighbours(name):
    """As of an interleaved schedule: rank 0 has stages 0 and 2, rank 1 stages 1 and 3."""
    reference, _, batch = ready(name)
    expected = uncut(reference, batch)
    models = [make_model(name).eval() for _ in range(2)]
    parts = [cut(model, [0, 1, 2, 3, 4], [rank, rank + 2]) for rank, model in enumerate(models)]
    stages = [parts[number % 2][number] for number in range(4)]
    outputs, between = run_in_turn(stages, (), model_arguments(batch, accepted_names(reference)))
    loss = loss_of(reference, None).sum(outputs, batch)
    assert torch.equal(loss.detach(), expected)
    backward_in_turn(loss, between)
    found: dict[str, Tensor] = {}
    for model in models:
        for key, p in model.named_parameters():
            if p.grad is not None:
                found[key] = found[key] + p.grad if key in found else p.grad
    for key, p in reference.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[key], p.grad, rtol=1e-5, atol=1e-6)


def test_the_check_sees_a_value_that_is_not_replaced_again(monkeypatch):
    """The output of T5's encoder goes to each block of the decoder."""
    inner = StageRange.arguments

    def once(self: Any, index: int, *args: Any) -> Any:
        return inner(self, index, *args) if index == self.begin else args[1:]

    monkeypatch.setattr(StageRange, "arguments", once)
    with pytest.raises(ValueError, match="not those of the uncut model"):
        find_layout(make_model("t5"), ["encoder.block", "decoder.block"])


def test_values_that_no_gradient_needs_are_not_carried():
    model = make_model("llama")
    layout = find_layout(model, find_block_lists(model))
    (blocks,) = layout.lists
    assert (blocks.name, blocks.length) == ("model.layers", 4)
    assert len(blocks.first.carried) == len(blocks.later.carried) == 1
    t5 = find_layout(make_model("t5"), ["encoder.block", "decoder.block"])
    assert [len(each.later.carried) for each in t5.lists] == [2, 4]


class Between(nn.Module):
    """A norm with parameters between two blocks of one list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(self.norm(x))
        return x


class Twice(nn.Module):
    """A block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.blocks[0](x)))


class Skips(nn.Module):
    """Each block gets the results of the two before it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        before = x
        for block in self.blocks:
            x, before = block(x, before), x
        return x


class Around(nn.Module):
    """A loop that adds what a block returns to what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + 0.5 * block(x)
        return x


def test_a_loop_that_goes_around_its_blocks_is_told_what_to_change():
    with pytest.raises(ValueError) as caught:
        find_layout(Around(), ["blocks"], torch.randn(2, 8))
    said = str(caught.value)
    assert "what blocks.1 takes is computed from what blocks.0 returned and from what" in said
    assert "let the block return the sum" in said
    assert "LayeredModel" in said


class After(Around):
    """Nothing goes around a block: what is done to its result is done where it was computed."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = 2.0 * block(x).clamp(max=0.9)
        return x


def test_what_is_done_to_the_result_of_a_block_can_be_cut():
    assert find_layout(After(), ["blocks"], torch.randn(2, 8)).num_blocks == 4


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Between, "norm has parameters"), (Twice, "called twice"), (Skips, "hand on")],
)
def test_models_that_can_not_be_cut_are_refused(kind, says):
    with pytest.raises(ValueError, match=says):
        find_layout(kind(), ["blocks"], torch.randn(2, 8))


def test_a_model_without_a_plan_is_cut_between_its_largest_list():
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            self.tower = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    assert find_block_lists(Tower()) == ["tower"]
    with pytest.raises(ValueError, match="no ModuleList"):
        find_block_lists(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="'towers'"):
        find_block_lists(Tower(), ["towers"])


def test_the_stages_have_about_equally_many_parameters():
    model = make_model("llama")
    layout = find_layout(model, find_block_lists(model))
    assert stage_boundaries(model, layout, 2, None) == [0, 2, 4]
    assert stage_boundaries(model, layout, 4, None) == [0, 1, 2, 3, 4]
    assert stage_boundaries(model, layout, 2, (0, 3, 4)) == [0, 3, 4]
    with pytest.raises(ValueError, match=r"5 stages.*4 blocks"):
        stage_boundaries(model, layout, 5, None)
    with pytest.raises(ValueError, match="boundaries"):
        stage_boundaries(model, layout, 2, (0, 5))


def test_a_record_is_the_same_after_pickling():
    import pickle

    model = make_model("t5")
    layout = find_layout(model, find_block_lists(model))
    again: ModelLayout = pickle.loads(pickle.dumps(layout))
    assert again == layout
    hidden = torch.zeros(1)
    record: BlockRecord = again.lists[0].first
    assert record.passed((hidden,), {})[0] is hidden


def test_a_model_that_can_not_be_run_says_what_to_give():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    with pytest.raises(ValueError, match="example_inputs"):
        find_layout(Odd(), ["blocks"])
    assert find_layout(Odd(), ["blocks"], torch.randn(2, 8)).num_blocks == 2
