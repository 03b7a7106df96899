"""The blocks of a decoder for one token a row in one call: the bits of the ops that it stands for,
and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.ops import library
from pyops.ops.decoding.prepared import PreparedNorm, prepared_activation, prepared_code_rows
from pyops.ops.decoding.prepared import prepared_linear as linear
from pyops.ops.decoding.token_attention import token_attention_
from pyops.ops.decoding.token_blocks import (
    BlockForm,
    kind_of,
    token_blocks_,
    token_blocks_reference,
)
from tests.ops.decoding.decoding_samples import token_blocks
from tests.ops.decoding.random_blocks import DIM, blocks_of, form, kept_of

WIDE = torch.float64
# How q, k and v are made, products, biases, and the form
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"by": ("numbers",)}, {}),
    "llama of codes": ({"by": ("int8", "numbers", "int4", "uint8"), "bias": True}, {}),
    "gpt": (
        {"merged": True, "bias": True, "norm_bias": True, "gated": False},
        {"rms": False, "activation": "gelu", "gated": False, "interleaved": False},
    ),
    "gpt of codes": (
        {"merged": True, "by": ("uint8", "int4"), "norm_bias": True, "gated": False},
        {"rms": False, "activation": "relu", "gated": False},
    ),
}


def operands(case: str, *, rows: int = 2) -> dict[str, Any]:
    """Of a call; both models keep rows 1 and 2 of four."""
    made, changed = CASES[case]
    angle = torch.rand(rows, 1, 3)
    return {
        "x": torch.randn(rows, DIM),
        "blocks": blocks_of(torch.device("cpu"), **made),
        "kept": kept_of(torch.device("cpu"), rows=rows + 2, merged=made.get("merged", False)),
        "places": torch.tensor([[3], [1], [0]])[:rows],
        "turns": (angle.cos(), angle.sin()),
        "first_row": 1,
        "form": form(**changed),
    }


def by_ops(
    x: Tensor,
    blocks: tuple[list[Tensor], list[int]],
    kept: tuple[list[Tensor], list[Tensor]],
    places: Tensor,
    turns: tuple[Tensor, Tensor],
    *,
    first_row: int,
    form: BlockForm,
) -> Tensor:
    """The same, op by op."""
    tensors, kinds = iter(blocks[0]), iter(blocks[1])

    def norm(x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        weight, bias = next(tensors), next(tensors) if next(kinds) == kind_of(bias=True) else None
        options = {"eps": form.eps, "offset": 0.0 if form.rms else None}
        return PreparedNorm(weight, bias, **options)(x, added)

    def product(x: Tensor) -> Tensor:
        kind = next(kinds)
        bits, weight = kind & 15, next(tensors)
        scales = next(tensors) if bits else None
        zeros = next(tensors) if kind & kind_of(zero_points=True) else None
        bias = next(tensors) if kind & kind_of(bias=True) else None
        if not bits:
            return linear(weight, bias)(x)
        options: dict[str, Any] = {"bits": bits, "most_rows": 16, "otherwise": torch.neg}
        return prepared_code_rows(weight, scales, zeros, bias, **options)(x)

    activation = prepared_activation(form.activation, gated=form.gated)
    rows, merged, added = len(x), len(blocks[1]) == 6 * len(kept[0]), None
    for own in zip(*kept, strict=True):
        h, x = norm(x, added)
        q = product(h)
        if merged:
            q, k, v = q.view(rows, 1, -1, 3, form.width).unbind(3)
        else:
            q = q.view(rows, 1, -1, form.width)
            k, v = product(h).view(rows, 1, -1, 2, form.width).unbind(3)
        options = {"scale": form.scale, "interleaved": form.interleaved}
        y = token_attention_((q, k, v), own, places, turns, first_row=first_row, **options)
        h, x = norm(x, product(y))
        added = product(activation(product(h)))
    assert added is not None
    return x + added


def copied(kept: Any) -> Any:
    return [[tensor.clone() for tensor in part] for part in kept]


@pytest.mark.cpu_only
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_the_ops(case: str, isa: str):
    """Of the result, and of keys and values; at every instruction set, on any number of threads."""
    given = operands(case)
    kept = copied(given["kept"])
    expected = by_ops(**{**given, "kept": kept})
    threads = torch.get_num_threads()
    for number in (1, 3):
        own = copied(given["kept"])
        torch.set_num_threads(number)
        try:
            found = token_blocks_(**{**given, "kept": own})
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(found, expected)
        for part, other in zip(own, kept, strict=True):
            assert all(map(torch.equal, part, other))
    assert not torch.equal(kept[0][1], given["kept"][0][1])  # the second block has kept something


@pytest.mark.parametrize("case", ["llama", "gpt"])
def test_against_float64(case: str, device: torch.device):
    given = operands(case, rows=3)
    kinds, turns = given["blocks"][1], given["turns"]

    def moved(tensors: Iterable[Tensor], to: torch.dtype | torch.device) -> list[Tensor]:
        return [t.to(to, copy=True) for t in tensors]

    exact = [moved(part, WIDE) for part in ([given["x"]], given["blocks"][0], *given["kept"])]
    options = {"first_row": 1, **vars(given["form"])}
    expected = token_blocks_reference(
        exact[0][0], exact[1], kinds, *exact[2:], given["places"], *turns, **options
    )
    own = [
        moved(part, device) for part in ([given["x"]], given["blocks"][0], *given["kept"], turns)
    ]
    y = token_blocks_(
        own[0][0],
        (own[1], kinds),
        (own[2], own[3]),
        given["places"].to(device),
        (own[4][0], own[4][1]),
        first_row=1,
        form=given["form"],
    )
    torch.testing.assert_close(y.cpu().to(WIDE), expected, rtol=1e-4, atol=1e-5)
    for found, kept in zip(own[2] + own[3], exact[2] + exact[3], strict=True):
        torch.testing.assert_close(found.cpu().to(WIDE), kept, rtol=1e-4, atol=1e-5)


def with_operand(number: int, tensor: Tensor) -> Any:
    def change(given: dict[str, Any]) -> None:
        given["blocks"][0][number] = tensor

    return change


def with_kind(number: int, kind: int) -> Any:
    def change(given: dict[str, Any]) -> None:
        given["blocks"][1][number] = kind

    return change


def without_last(part: int) -> Any:
    def change(given: dict[str, Any]) -> None:
        del given["blocks"][part][-1]

    return change


def with_keys(tensor: Tensor) -> Any:
    def change(given: dict[str, Any]) -> None:
        given["kept"][0][1] = tensor

    return change


def with_form(**changed: Any) -> Any:
    def change(given: dict[str, Any]) -> None:
        given["form"] = form(**changed)

    return change


def with_values_of_one_block(given: dict[str, Any]) -> None:
    del given["kept"][1][1]


def with_another_x(given: dict[str, Any]) -> None:
    given["x"] = given["x"].to(WIDE)


# Operands of a block of "llama": norm1, q, kv, output, norm2, up, down.
@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_another_x, "x must be float32"),
        (with_operand(0, torch.zeros(DIM + 1)), r"weight of a norm must be float32 \[32\]"),
        (with_operand(8, torch.zeros(31, DIM)), "outputs are no heads of width 8"),
        (with_operand(9, torch.zeros(48, DIM)), "outputs are no heads of width 8"),
        (with_operand(10, torch.zeros(DIM, 40)), r"output must be float32 \[outputs, 32\]"),
        (with_operand(10, torch.zeros(DIM, DIM).mT[:, :]), "must be contiguous"),
        (with_operand(10, torch.zeros(40, DIM)), "output must have 32 outputs, got 40"),
        (with_operand(12, torch.zeros(97, DIM)), "even number of outputs, got 97"),
        (with_operand(13, torch.zeros(DIM, 47)), r"down must be float32 \[outputs, 48\]"),
        (with_operand(13, torch.zeros(31, 48)), "down must have 32 outputs, got 31"),
        (with_kind(7, 8), "root-mean-square norm must be 0, got 8"),
        (with_kind(13, 8), "kinds name more than the 14 operands"),
        (with_kind(6, 5), "bits must be 4 or 8"),
        (without_last(0), "kinds name more than the 13 operands"),
        (without_last(1), "6 or 7 kinds"),
        (with_keys(torch.zeros(4, 2, 5, 9)), "keys and values must be contiguous"),
        (with_keys(torch.zeros(4, 2, 3, 8)), "keys and values must be contiguous"),
        (with_values_of_one_block, "keys and values of each block"),
        (with_form(width=0), "heads 1 wide or wider"),
        (with_form(activation="tanh"), "activation must be one of"),
    ],
)
def test_what_is_refused(change: Any, message: str):
    """Before anything is kept."""
    if not library.build_info()["extension"]:
        pytest.skip("plain torch has no such checks")
    given = operands("llama")
    change(given)
    before = copied(given["kept"])
    with pytest.raises(RuntimeError, match=message):
        token_blocks_(**given)
    for part, other in zip(before, given["kept"], strict=True):
        assert all(map(torch.equal, part, other))


@pytest.mark.cpu_only
def test_operands_that_no_kind_names_are_refused():
    given = operands("llama")
    given["blocks"][0].append(torch.zeros(1))
    with pytest.raises(RuntimeError, match="of 15 operands the kinds name only some"):
        token_blocks_(**given)


def test_no_rows(device: torch.device):
    (x, operands, kinds, keys, values, places, cos, sin), options = token_blocks(device)
    none = (t[:0] for t in (x, places, cos, sin))
    x, places, cos, sin = none
    y = torch.ops.pyops.token_blocks_(x, operands, kinds, keys, values, places, cos, sin, **options)
    assert y.shape == (0, DIM)
