"""BERT, T5 and ViT: what is promised of each, and what is refused. That they compute what the
papers say is tested against transformers, in tests/hub."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pyops.models import BERT, T5, ViT
from tests.grids import full
from tests.models.families import BATCH, FAMILIES, LENGTH, VOCAB, loss_of, make

OTHERS = ["bert", "t5", "vit"]


def quiet(name: str, **changes: object) -> torch.nn.Module:
    """A model without dropout."""
    model, config = FAMILIES[name]
    return model(dataclasses.replace(config, dropout=0.0, attention_dropout=0.0, **changes), seed=5)


@pytest.mark.parametrize("name", OTHERS)
def test_dropout_is_of_the_row_of_the_global_batch_and_the_step(name):
    model = make(name, dtype=torch.float64)

    def total(step: int, first_row: int, rows: int) -> float:
        return run_sum(model, step, first_row, rows)

    whole = total(3, 0, BATCH)
    assert sum(total(3, row, 1) for row in range(BATCH)) == pytest.approx(whole, abs=1e-10)
    assert total(4, 0, BATCH) != pytest.approx(whole, abs=1e-6)
    model.eval()
    assert total(4, 0, BATCH) == total(3, 0, BATCH) != pytest.approx(whole, abs=1e-6)


def run_sum(model: torch.nn.Module, step: int, first_row: int, rows: int) -> float:
    """The loss as a sum, so that parts of a batch add up."""
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "reduction": "sum"})  # type: ignore[method-assign]
    try:
        return loss_of(model, step=step, first_row=first_row, rows=rows).item()
    finally:
        model.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("name", OTHERS)
def test_every_dropout_draws_from_a_stream_of_its_own(name):
    model = make(name)
    loss_of(model, step=0)
    states = [m.state for m in model.modules() if getattr(m, "state", None) is not None]
    with_p = [
        m
        for m in model.modules()
        if getattr(m, "p", 0.0) > 0.0 or isinstance(getattr(m, "dropout", None), float)
    ]
    assert len(states) >= len(with_p) > 4
    assert len({state[0].item() for state in states}) == len(states)


@pytest.mark.full  # seconds of compiling: that of GPT stands in the suite
@pytest.mark.real_device
@pytest.mark.slow
@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["bert", full("t5"), full("vit")])
def test_torch_compile_breaks_no_graph(name):
    model = make(name, num_layers=1)
    wanted = [loss_of(model, step=step).item() for step in range(2)]
    model.compile(fullgraph=True, backend="aot_eager")
    for step in range(2):  # another mask, and no new graph
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            assert loss_of(model, step=step).item() == pytest.approx(wanted[step], abs=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_16_bit_model_is_close_to_the_wide_one(name):
    wide = loss_of(make(name, dtype=torch.float64), step=1)
    narrow = loss_of(make(name, dtype=torch.bfloat16), step=1)
    assert narrow.dtype == torch.float32
    assert narrow.item() == pytest.approx(wide.item(), rel=0.02)
    narrow.backward()


def test_padding_is_not_seen():
    bert, t5 = quiet("bert"), quiet("t5")
    tokens = torch.arange(LENGTH)[None] % VOCAB
    mask = torch.tensor([[True, True, True, False, False]])
    other = tokens.clone()
    other[0, 3:] = 7
    assert torch.equal(bert(tokens, mask=mask)[0][:, :3], bert(other, mask=mask)[0][:, :3])
    assert not torch.equal(bert(tokens)[0][:, :3], bert(other)[0][:, :3])
    assert torch.equal(t5(tokens, tokens, mask=mask), t5(other, tokens, mask=mask))
    assert not torch.equal(t5(tokens, tokens), t5(other, tokens))
    seen = t5(tokens, tokens)[:, :3], t5(tokens, other)[:, :3]
    assert torch.equal(*seen), "a decoder's token sees nothing of later ones"


def test_t5_shifts_its_targets():
    model = quiet("t5", start_token=4)
    assert model.shifted(torch.tensor([[5, 6, -100, 7]])).tolist() == [[4, 5, 6, 0]]


def test_the_layers_of_a_vit_composed_are_the_model():
    model = quiet("vit")
    images = torch.randn(2, 3, 4, 4)
    x = images
    for layer in model.layers():
        x = layer(x)
    assert torch.equal(x, model(images))


def test_a_bert_without_a_pooled_head_gives_logits_alone():
    model = quiet("bert", pooled_head=False)
    assert model(torch.zeros(2, LENGTH, dtype=torch.int64)).shape == (2, LENGTH, VOCAB)
    assert not [name for name, _ in model.named_parameters() if "pooler" in name or "next" in name]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert", {"num_heads": 3}, "dim is 8, which num_heads = 3 does not divide"),
        (
            "bert",
            {"activation": "swiglu"},
            "activation is 'swiglu'; choose one of gelu, gelu_tanh, relu",
        ),
        (
            "bert",
            {"num_heads": 8, "positions": "rotary"},
            r"a head is 1 wide \(dim 8 / num_heads 8\); make that even",
        ),
        ("bert", {"num_types": 0}, "num_types is 0; it must be 1 or more"),
        ("t5", {"num_buckets": 5}, "num_buckets is 5; it must be even, 4 or more"),
        ("t5", {"start_token": 13}, "start_token is 13, outside the vocabulary of 13"),
        ("t5", {"num_decoder_layers": -1}, "num_decoder_layers is -1"),
        ("vit", {"patch_size": 3}, "image_size is 4, which patch_size = 3 does not divide"),
        ("vit", {"dropout": 1.0}, "dropout is 1.0; it is a probability"),
    ],
)
def test_a_bad_shape_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FAMILIES[name][1], **changes)


def test_bad_inputs_are_refused():
    with pytest.raises(ValueError, match="6 tokens is longer than sequence_length = 5"):
        quiet("bert")(torch.zeros(1, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"token 13 at \[0, 1\] is outside the vocabulary of 13"):
        quiet("t5")(torch.tensor([[0, 13]]), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"images are \(2, 3, 5, 5\); this model takes \[B, 3, 4, 4\]"
    ):
        quiet("vit")(torch.zeros(2, 3, 5, 5))
    assert {type(quiet(name)) for name in OTHERS} == {BERT, T5, ViT}
