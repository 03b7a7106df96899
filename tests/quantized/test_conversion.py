"""convert: what becomes of layers and models, what is refused, what a folder keeps."""

from __future__ import annotations

import copy
import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from pyops.adapters import LoRA
from pyops.adapters import load as load_adapters
from pyops.adapters import save as save_adapters
from pyops.models import GPT, GPTConfig, ViT, ViTConfig, generate
from pyops.quantized import (
    FP8,
    Int4,
    Int8,
    IntN,
    QuantizedLinear,
    Scheme,
    convert,
    decode,
    encode,
    load,
    save,
)

pytestmark = pytest.mark.cpu_only

W8A8 = Scheme(Int8(), Int8(per="token"))
SCHEMES = (
    Scheme(),
    W8A8,
    Scheme(Int8(), Int8(per="token", symmetric=False)),
    Scheme(Int8(symmetric=False)),
    Scheme(Int4(group=8)),
    Scheme(Int4(group=None, symmetric=False)),
    Scheme(IntN(3, group=6)),  # a group that the kernel of few rows does not take
    Scheme(FP8()),
)


def layers(*widths: int, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(n, m, bias=bias) for n, m in pairwise(widths)))


def expected(x: Tensor, layer: nn.Linear, scheme: Scheme) -> Tensor:
    """By the decoded codes, in float64."""
    weight = decode(encode(layer.weight, scheme.weights)).double()
    if scheme.activations is not None:
        x = decode(encode(x, scheme.activations))
    return functional.linear(x.double(), weight, layer.bias.double())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_layer_computes_with_its_codes(scheme: Scheme):
    plain = layers(48, 20)
    model = copy.deepcopy(plain)
    report = convert(model, scheme)
    assert isinstance(model[0], QuantizedLinear)
    for rows in (1, 3, 40):  # the kernel of few rows, and the product of many
        x = torch.randn(2, rows, 48)
        y = model(x)
        assert y.shape == (2, rows, 20)
        torch.testing.assert_close(y.double(), expected(x, plain[0], scheme), rtol=1e-5, atol=1e-5)
        # Far enough from the product of floats to tell that codes are at work
        assert 1e-4 < (y - plain(x)).abs().max() < 1.0
    error = report.layers[0].error
    weight = plain[0].weight.detach()
    lost = weight - decode(encode(weight, scheme.weights))
    assert error == pytest.approx(float(lost.norm() / weight.norm()), rel=1e-5)
    held = (model[0].codes, model[0].scales, model[0].zero_points)
    assert report.bytes_after == sum(t.nbytes for t in held if t is not None)
    assert report.bytes_before == 4 * 48 * 20
    assert "0 " in str(report)


def test_gradients_are_those_of_the_decoded_weight():
    for scheme in (W8A8, Scheme(Int4(group=8))):
        plain = layers(48, 20)
        model = copy.deepcopy(plain)
        convert(model, scheme)
        x, dy = torch.randn(3, 48, requires_grad=True), torch.randn(3, 20)
        y = model(x)
        assert y.requires_grad
        dx, dbias = torch.autograd.grad(y, [x, model[0].bias], dy)
        weight = decode(encode(plain[0].weight, scheme.weights))
        torch.testing.assert_close(dx, dy @ weight)
        torch.testing.assert_close(dbias, dy.sum(0))


def test_a_row_that_is_not_finite_spoils_itself_alone():
    model = layers(16, 6)
    convert(model, W8A8)
    x = torch.randn(5, 16)
    whole = model(x)
    x[3, 2] = torch.inf
    y = model(x)
    assert y[3].isnan().all()
    rest = [0, 1, 2, 4]
    assert torch.equal(y[rest], whole[rest])


@pytest.mark.parametrize("weights", [Int8(), FP8()], ids=str)
def test_casting_a_model_leaves_codes_and_scales_as_they_are(weights):
    model = layers(32, 8)
    convert(model, Scheme(weights))
    before = model[0].scales.clone()
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half[0].codes.dtype == model[0].codes.dtype
    assert half[0].scales.dtype == torch.float32
    assert torch.equal(half[0].scales, before)
    assert half[0].bias.dtype == torch.bfloat16
    x = torch.randn(3, 32)
    torch.testing.assert_close(half(x.bfloat16()).float(), model(x), rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16


CONFIG = GPTConfig(
    vocab_size=17, sequence_length=12, num_layers=2, num_heads=4, dim=32, positions="rotary"
)


def test_a_language_model_keeps_its_head_and_its_words():
    model = GPT(CONFIG, seed=1).eval()
    tokens = torch.arange(24).view(2, 12) % 17
    with torch.no_grad():
        logits = model(tokens)
        report = convert(model, W8A8)
        found = model(tokens)
    assert [layer.name for layer in report.layers] == [
        f"blocks.{i}.{name}"
        for i in range(2)
        for name in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
    ]
    assert report.left == ("head.output",)
    assert 0 < (found - logits).abs().max() < 0.1 * logits.abs().max()
    (row,) = generate(model, [[1, 2, 3]], max_new=4, temperature=0)
    alone = model(torch.tensor([[1, 2, 3, *row.tokens]]))[0, 2:-1].argmax(-1).tolist()
    assert row.tokens == alone


def test_models_of_others_and_grouped_heads():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 11, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        logits = model(tokens).logits
        report = convert(model, W8A8)  # Conv1D, whose weight is [in, out]
        found = model(tokens).logits
    assert [layer.shape for layer in report.layers] == [(48, 16), (16, 16), (64, 16), (16, 64)]
    assert report.left == ("lm_head",)
    assert 0 < (found - logits).abs().max() < 0.05 * logits.abs().max()
    grouped = GPT(
        GPTConfig(
            vocab_size=17,
            sequence_length=12,
            num_layers=1,
            num_heads=4,
            num_kv_heads=2,
            dim=32,
            activation="swiglu",
            tied_head=False,
        ),
        seed=1,
    ).eval()
    with torch.no_grad():
        logits = grouped(tokens)
        convert(grouped, Scheme(Int8()))
        assert 0 < (grouped(tokens) - logits).abs().max() < 0.05 * logits.abs().max()
    images = ViT(
        ViTConfig(num_labels=3, image_size=8, patch_size=4, num_layers=1, num_heads=2, dim=16)
    )
    assert len(convert(images, only=["blocks.*"]).layers) == 4


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_folder_gives_the_same_bits(scheme: Scheme, tmp_path):
    model, other = layers(48, 24, 12), layers(48, 24, 12)
    convert(model, scheme)
    save(model, tmp_path / "codes")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(torch.nan)  # as memory may be that was never written
    load(other, tmp_path / "codes")
    x = torch.randn(5, 48)
    assert torch.equal(other(x), model(x))
    again = load(other, tmp_path / "codes")  # into a model that has codes already
    assert torch.equal(again(x), model(x))
    save(model, tmp_path / "codes")  # in the place of the one before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["codes"]


def test_adapters_on_codes(tmp_path):
    """A layer of codes learns by an adapter; its codes stay, and can't take the update."""
    model = GPT(CONFIG, seed=1).eval()
    convert(model, Scheme(Int4(group=8)))
    tokens = torch.arange(24).view(2, 12) % 17
    codes = model.blocks[0].mlp.up.codes.clone()
    first = model.loss(tokens[:, :-1], tokens[:, 1:]).detach()
    lora = LoRA(model, rank=2, alpha=4, seed=1)
    assert len(lora.layers) == 8
    optimizer = torch.optim.Adam(lora.parameters(), lr=0.02)
    for step in range(8):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        if step == 0:
            assert torch.equal(loss.detach(), first)  # B is zero
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < first - 0.1
    assert torch.equal(model.blocks[0].mlp.up.codes, codes)
    with pytest.raises(ValueError, match="can't hold the update"):
        lora.merge()
    save_adapters(lora, tmp_path / "adapters")
    base = GPT(CONFIG, seed=1).eval()
    convert(base, Scheme(Int4(group=8)))
    load_adapters(base, tmp_path / "adapters")
    with torch.no_grad():
        assert torch.equal(base(tokens), model(tokens))
        other = GPT(CONFIG, seed=1).eval()
        convert(other, Scheme(Int4(group=8)))
        other.blocks[1].mlp.up.codes[0, 0] ^= 1
    with pytest.raises(ValueError, match="fingerprint"):
        load_adapters(other, tmp_path / "adapters")


def with_nan() -> nn.Module:
    model = layers(8, 4, 2)
    with torch.no_grad():
        model[1].weight[1, 3] = torch.nan
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.other = nn.Embedding(4, 8), nn.Linear(8, 4), nn.Linear(8, 8)
        self.head.weight = self.table.weight


def adapted() -> nn.Module:
    model = layers(8, 4, 2)
    LoRA(model, rank=1)
    return model


def converted() -> nn.Module:
    model = layers(8, 4, 2)
    convert(model)
    return model


def with_nan_bias() -> nn.Module:
    model = layers(8, 4, 2).eval()
    with torch.no_grad():
        model[0].bias[3] = torch.nan
    return model


def with_nan_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    with torch.no_grad():
        model[1].weight[2] = torch.nan
    return model


BATCH = torch.ones(9, 8)

REFUSED = (
    (with_nan_bias, {}, r"the bias of 0 is nan at \[3\]"),
    (with_nan_norm, {"method": "gptq", "batches": [BATCH]}, "gptq: 1.weight has a number that is"),
    (lambda: layers(8, 4), {"scheme": "int8"}, "scheme is 'int8'; give a Scheme, such as"),
    (lambda: layers(8, 4), {"scheme": Scheme}, "scheme is <class .*; give a Scheme"),
    (lambda: layers(8, 4), {"only": []}, r"only is \[\], which names no layer"),
    (lambda: layers(8, 4), {"only": [1]}, r"only is \[1\]; give a list of patterns of names"),
    (lambda: layers(8, 4), {"method": "gptq", "batches": BATCH}, "batches is a Tensor; give a"),
    (lambda: layers(8, 4), {"method": "awq", "batches": 3}, "batches is a int; give a list"),
    (lambda: layers(8, 4), {"method": "awq", "batches": [3]}, "batch 0 is a int; give a tensor"),
    (lambda: layers(8, 4), {"method": "gptq", "batches": [BATCH[:0]]}, "no example has a number"),
    (with_nan, {}, r"the weight of 1 is nan at \[1, 3\]"),
    (lambda: layers(12, 4), {"scheme": Scheme(Int4(group=8))}, "12 inputs of 0; .*2, 4, 6, 12"),
    (lambda: layers(133_145, 1), {"scheme": W8A8}, "133145 inputs.*up to 133144"),
    (lambda: layers(8, 4), {"scheme": Scheme(FP8(), FP8(per="token"))}, "no product of fp8"),
    (lambda: layers(8, 4), {"scheme": Scheme(Int4(8), Int8(per="token"))}, "weights are symmetric"),
    (lambda: layers(8, 4), {"scheme": Scheme(Int8(), Int8(per="tensor"))}, "want batches"),
    (lambda: layers(8, 4), {"only": ["block"]}, "'block' matches none of 1 linear layers"),
    (lambda: layers(8, 4), {"only": "0"}, r"give a list of patterns: \['0'\]"),
    (lambda: layers(8, 4), {"method": "best"}, "method is 'best'"),
    (Tied, {"only": ["head"]}, "the weight of head is used by table.weight"),
    (Tied, {"only": ["table"]}, "matches table, a Embedding"),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 1)), {"only": ["0"]}, "matches 0, a Conv2d"),
    (lambda: nn.Sequential(nn.ReLU()), {}, "no linear layer to convert"),
    (lambda: nn.Linear(4, 4), {}, "put it in a Sequential"),
    (adapted, {}, "0 has an adapter"),
    (converted, {"only": ["0"]}, "0 was converted before"),
    (lambda: GPT(CONFIG), {"only": ["head.*"]}, "the weight of head.output is used by"),
)


@pytest.mark.parametrize(("make", "options", "message"), REFUSED, ids=lambda case: str(case)[:24])
def test_what_is_refused(make, options, message):
    model = make()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    with pytest.raises((ValueError, TypeError), match=message):
        convert(model, options.pop("scheme", None), **options)
    assert [type(m) for m in model.modules()] == kinds
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


def test_shared_weights_are_left_out_unless_named():
    report = convert(Tied())
    assert [layer.name for layer in report.layers] == ["other"]
    assert report.left == ("head",)


def test_folders_that_do_not_fit(tmp_path):
    model = layers(8, 4, 2)
    convert(model, W8A8)
    save(model, tmp_path / "codes")
    for other, message in (
        (layers(8, 4), "which Sequential does not have"),
        (layers(8, 5, 2), r"has codes \[4, 8\] I8 of 0, whose weight is \[5, 8\]"),
        (layers(6, 4, 2), r"has codes \[4, 8\] I8 of 0, whose weight is \[4, 6\]"),
        (nn.Sequential(*layers(8, 4, 2), nn.LayerNorm(2)), "has 2.weight of shape None"),
        (converted(), "the model was converted by"),
    ):
        kinds = [type(m) for m in other.modules()]
        before = {name: t.clone() for name, t in other.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            load(other, tmp_path / "codes")
        assert [type(m) for m in other.modules()] == kinds
        assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())
    with pytest.raises(ValueError, match="has no converted layer"):
        save(layers(8, 4), tmp_path / "other")
    with pytest.raises(ValueError, match="does not exist"):
        load(layers(8, 4), tmp_path / "other")
    config = tmp_path / "codes" / "quantized.json"
    stored = json.loads(config.read_text())
    stored["layers"]["0"]["weights"]["format"] = "Int5"
    config.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="is damaged"):
        load(layers(8, 4, 2), tmp_path / "codes")
    config.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is damaged"):
        load(layers(8, 4, 2), tmp_path / "codes")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"quantized.save: .*sub can't be written: Not a dir"):
        save(model, tmp_path / "file" / "sub")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["codes", "file"]
    (tmp_path / "codes" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="holds notes"):
        save(model, tmp_path / "codes")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("0.input_range"), r"input_range \[\]  of 0"),
        (lambda t: t.update({"0.codes": t["0.codes"].float()}), r"codes \[4, 8\] F32 of 0"),
        (lambda t: t.update({"0.scales": t["0.scales"][:1]}), r"scales \[1\] F32 of 0"),
        (lambda t: t.update({"0.scales": t["0.scales"].int()}), r"scales \[4\] I32 of 0"),
    ],
)
def test_tensors_of_another_kind_are_refused(change, message, tmp_path):
    """Before a layer is replaced."""
    model = layers(8, 4).eval()
    convert(model, Scheme(Int8(), Int8(per="tensor")), batches=[BATCH])
    save(model, tmp_path / "codes")
    path = tmp_path / "codes" / "quantized.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, path)
    other = layers(8, 4)
    before = other[0].weight.clone()
    with pytest.raises(ValueError, match=message):
        load(other, tmp_path / "codes")
    assert torch.equal(other[0].weight, before)
