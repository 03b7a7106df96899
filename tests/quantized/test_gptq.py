"""GPTQ against the column-by-column rule in float64, and what it must never be worse than."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pyops.quantized import FP8, Codes, Int4, Int8, IntN, decode, encode
from pyops.quantized.calibration import GPTQConfig, gptq, gptq_codes
from pyops.quantized.formats import Format, extremes, scales_of, to_codes

pytestmark = pytest.mark.cpu_only


def layer(out: int, inner: int, seed: int = 0, correlated: bool = True) -> tuple[Tensor, Tensor]:
    """A weight, and 2 / n X^T X of inputs that go together."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, inner, generator=g)
    x = torch.randn(400, inner, generator=g, dtype=torch.float64)
    if correlated:
        x = x @ torch.randn(inner, inner, generator=g, dtype=torch.float64)
    return weight, x.t() @ x * (2 / len(x))


def column_by_column(weight: Tensor, products: Tensor, format: Format) -> Codes:
    """The rule as it is written, one column after the other over the whole row; the factor is found
    by elimination, without a Cholesky routine."""
    w, inner = weight.double().clone(), weight.shape[1]
    h = products + 0.01 * products.diagonal().mean() * torch.eye(inner, dtype=torch.float64)
    inverse = torch.linalg.inv(h)
    plain = encode(weight, format)
    codes, scales, zeros = plain.codes.clone(), plain.scales.clone(), plain.zero_points
    zeros = None if zeros is None else zeros.clone()
    for j in range(inner):
        if format.group and j % format.group == 0:
            s, z = scales_of(*extremes(w[:, j : j + format.group].float(), format), format)
            scales[:, j // format.group] = s[:, 0]
            if zeros is not None:
                zeros[:, j // format.group] = z[:, 0]
        at = slice(j // format.group, j // format.group + 1) if format.group else None
        s, z = (t if t is None or at is None else t[:, at] for t in (scales, zeros))
        one = to_codes(w[:, j : j + 1].float(), s, z, format)
        codes[:, j] = one.codes[:, 0]
        error = (w[:, j] - decode(one)[:, 0].double()) / inverse[j, j]
        w[:, j + 1 :] -= error[:, None] * inverse[j, j + 1 :]
        inverse[j + 1 :, j + 1 :] -= inverse[j + 1 :, j, None] * inverse[j, j + 1 :] / inverse[j, j]
    return Codes(codes, scales, zeros, format, -1)


def loss(codes: Codes, weight: Tensor, products: Tensor) -> float:
    d = decode(codes).double() - weight.double()
    return float((d @ products * d).sum())


@pytest.mark.parametrize(
    "format",
    [Int8(), Int4(group=32), Int4(group=16, symmetric=False), IntN(3), IntN(2, group=160)],
    ids=str,
)
def test_the_rule_column_by_column(format: Format):
    """Over a block and a rest; groups in a block, and wider than one."""
    weight, products = layer(5, 160)
    found = gptq_codes(weight, products, format)
    expected = column_by_column(weight, products, format)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)
    assert format.symmetric or torch.equal(found.zero_points, expected.zero_points)
    assert not torch.equal(found.codes, encode(weight, format).codes)


@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("format", [Int4(group=32), IntN(3), Int8()], ids=str)
def test_never_worse_than_to_nearest(format: Format, by_size: bool):
    for seed in range(6):
        weight, products = layer(8, 96, seed)
        found = gptq_codes(weight, products, format, GPTQConfig(by_size=by_size))
        nearest = loss(encode(weight, format), weight, products)
        assert loss(found, weight, products) < 0.8 * nearest


@pytest.mark.parametrize("by_size", [False, True])
def test_to_nearest_where_inputs_do_not_go_together(by_size: bool):
    weight, _ = layer(6, 64)
    diagonal = torch.rand(64, dtype=torch.float64).diag()
    for products in (diagonal, torch.zeros(64, 64, dtype=torch.float64)):
        for format in (Int4(group=32), Int8()):
            found = gptq_codes(weight, products, format, GPTQConfig(by_size=by_size))
            assert torch.equal(found.codes, encode(weight, format).codes)
            assert torch.equal(found.scales, encode(weight, format).scales)


def test_halves_go_to_the_even_code():
    """As `encode` rounds, where nothing is moved."""
    weight = torch.tensor([[127.0, 0.5, 1.5, -2.5], [-127.0, 3.5, -0.5, 4.5]])
    found = gptq_codes(weight, torch.eye(4, dtype=torch.float64), Int8())
    assert found.codes.tolist() == [[127, 0, 2, -2], [-127, 4, 0, 4]]


def test_a_model_block_by_block():
    """The second layer is calibrated with what the rounded first one gives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).eval()
    first, second = (model[i].weight.detach().clone() for i in (0, 2))
    batches = list(torch.randn(3, 40, 16))
    codes = gptq(model, IntN(2), batches)
    x = torch.cat(batches).double()
    assert torch.equal(model[0].weight, decode(codes["0"]))
    expected = gptq_codes(first, x.t() @ x * (2 / len(x)), IntN(2))
    assert torch.equal(codes["0"].codes, expected.codes)
    with torch.no_grad():
        hidden = model[:2](torch.cat(batches)).double()
    expected = gptq_codes(second, hidden.t() @ hidden * (2 / len(x)), IntN(2))
    assert torch.equal(codes["2"].codes, expected.codes)
    assert torch.equal(model[2].weight, decode(codes["2"]))


def test_too_few_tokens_are_warned_of():
    model = nn.Sequential(nn.Linear(16, 4)).eval()
    with pytest.warns(UserWarning, match="0 has 16 inputs and was given 5 tokens"):
        gptq(model, Int8(), [torch.randn(5, 16)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": FP8()}, r"gptq rounds to whole numbers; got FP8"),
        ({"format": Int4(group=10)}, r"0 has 16 inputs on a rank, which groups of 10.*2, 4, 8, 16"),
        ({"batches": None}, r"gptq wants examples"),
        ({"weight": torch.inf}, r"the weight of 0 is not finite at \[1, 3\]"),
        ({"x": torch.nan}, r"the inputs of 0 are not all finite"),
        ({"train": True}, r"training mode"),
    ],
)
def test_what_is_refused(change: dict, message: str):
    model = nn.Sequential(nn.Linear(16, 4)).train(change.get("train", False))
    x = torch.randn(20, 16)
    x[0, 0] = change.get("x", 0.0)
    with torch.no_grad():
        model[0].weight[1, 3] = change.get("weight", 0.5)
    before = model[0].weight.clone()
    with pytest.raises(ValueError, match=message):
        gptq(model, change.get("format", Int8()), change.get("batches", [x]))
    assert torch.equal(model[0].weight, before)
    with pytest.raises(ValueError, match="damping is 0"):
        GPTQConfig(damping=0.0)
