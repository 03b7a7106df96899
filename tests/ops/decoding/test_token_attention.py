"""Attention of one token a row over what is kept: values, places, rotary, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.ops import library
from pyops.ops.decoding.token_attention import token_attention_, token_attention_reference

WIDE = torch.float64
# Rows, heads, groups, width, turned pairs (0: none), interleaved: registers and a rest, heads that
# share keys, heads that are turned in part.
CASES = (
    (1, 1, 1, 1, 0, False),
    (1, 8, 8, 64, 32, False),
    (3, 4, 2, 24, 12, True),
    (4, 6, 1, 37, 8, False),
    (5, 4, 4, 80, 0, False),
)
ROOM, FIRST = 70, 2


def operands(
    rows: int, heads: int, groups: int, width: int, half: int, interleaved: bool
) -> dict[str, Any]:
    """One token for each row at places of their own; what no token has written is nan."""
    qkv = torch.randn(rows, 1, heads + 2 * groups, width)
    q, k, v = qkv.split([heads, groups, groups], 2)
    places = torch.tensor([[ROOM - 1], [0], [17], [64], [31]])[:rows]
    keys, values = torch.randn(2, rows + FIRST + 1, groups, ROOM, width).unbind()
    for row, place in enumerate(places.flatten().tolist()):
        for kept in (keys, values):
            kept[FIRST + row, :, place:] = torch.nan
    angle = torch.rand(rows, 1, half) * 6
    turns = (angle.cos(), angle.sin()) if half else None
    options = {"first_row": FIRST, "scale": 0.7 * width**-0.5, "interleaved": interleaved}
    return {"tensors": (q, k, v, keys, values, places), "turns": turns, "options": options}


def exact(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The result in float64, and keys and values behind it."""
    q, k, v, keys, values, places = given["tensors"]
    keys, values = keys.to(WIDE), values.to(WIDE)
    turns = given["turns"] or (None, None)
    y = token_attention_reference(
        *(x.to(WIDE) for x in (q, k, v)), keys, values, places, *turns, **given["options"]
    )
    return y, keys, values


@pytest.mark.cpu_only
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: tuple[Any, ...], isa: str):
    """What is kept is there up to the row's place, and nothing else has changed."""
    given = operands(*case)
    q, k, v, keys, values, places = given["tensors"]
    expected, expected_keys, expected_values = exact(given)
    y = token_attention_((q, k, v), (keys, values), places, given["turns"], **given["options"])
    assert y.shape == (case[0], case[1] * case[3])
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=2e-6)
    same = {"rtol": 0, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(keys.double(), expected_keys, **same)
    torch.testing.assert_close(values.double(), expected_values, rtol=0, atol=0, equal_nan=True)


def test_by_hand(device: torch.device, isa: str):
    """Two kept tokens and the new one, the last of which is seen most; a fourth is not seen."""
    keys = torch.zeros(1, 1, 4, 2, device=device)
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 9.0], [torch.nan] * 2], device=device)
    values = values.view(1, 1, 4, 2)
    one = torch.tensor([2.0, 0.0], device=device).view(1, 1, 1, 2)
    v = torch.tensor([4.0, 2.0], device=device).view(1, 1, 1, 2)
    places = torch.tensor([2], device=device)
    y = token_attention_((one, one, v), (keys, values), places, scale=0.5)
    e = torch.tensor(2.0).exp()
    expected = torch.stack([1 + 4 * e, 1 + 2 * e]) / (2 + e)
    torch.testing.assert_close(y.cpu(), expected[None])
    assert keys[0, 0, 2].tolist() == [2.0, 0.0]
    assert values[0, 0, 2].tolist() == [4.0, 2.0]


@pytest.mark.cpu_only
def test_a_row_has_the_same_bits_alone_and_on_any_number_of_threads():
    threads, case = torch.get_num_threads(), (5, 8, 4, 64, 32, False)
    given = operands(*case)
    q, k, v, keys, values, places = given["tensors"]
    cos, sin = given["turns"]
    for isa in library.isas():
        with library.use_isa(isa):
            found = []
            for n in (1, 3):
                torch.set_num_threads(n)
                kept = keys.clone(), values.clone()
                found.append(
                    token_attention_((q, k, v), kept, places, (cos, sin), **given["options"])
                )
            torch.set_num_threads(threads)
            options = {**given["options"], "first_row": FIRST + 3}
            own = slice(3, 4)
            alone = token_attention_(
                (q[own], k[own], v[own]),
                (keys.clone(), values.clone()),
                places[own],
                (cos[own], sin[own]),
                **options,
            )
            assert torch.equal(found[0], found[1])
            assert torch.equal(alone, found[0][own])


@pytest.mark.cpu_only
def test_scores_of_any_size(isa: str):
    """Large ones overflow no exponential; nan and inf turn up."""
    given = operands(2, 2, 2, 16, 0, False)
    q, k, v, keys, values, places = given["tensors"]
    large = exact({**given, "options": {**given["options"], "scale": 300.0}})[0]
    options = {**given["options"], "scale": 300.0}
    kept = keys.clone(), values.clone()
    y = token_attention_((q, k, v), kept, places, **options)
    torch.testing.assert_close(y.double(), large, rtol=1e-3, atol=1e-4)
    q = q.clone()
    q[1, 0, 0, 3] = torch.nan
    y = token_attention_((q, k, v), (keys, values), places, **options).view(2, 2, 16)
    assert y[1, 0].isnan().all()
    assert y[0].isfinite().all()
    assert y[1, 1].isfinite().all()


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(2, 1, 3, 8)}, "H a multiple of G"),
        ({"k": torch.zeros(2, 1, 2, 8, dtype=WIDE)}, "must be float32"),
        ({"v": torch.zeros(2, 1, 2, 7)}, "must be float32"),
        ({"keys": torch.zeros(2, 2, 8, 5).mT}, "contiguous"),
        ({"values": torch.zeros(2, 2, 4, 8)}, "keys and values"),
        ({"places": torch.tensor([1, 5])}, "place 5 is not within the room of 5"),
        ({"places": torch.tensor([-1, 2])}, "place -1"),
        ({"places": torch.tensor([1])}, "places must be int64 of 2 numbers"),
        ({"turns": (torch.zeros(2, 1, 5), torch.zeros(2, 1, 5))}, "R <= 8"),
        ({"first_row": 1}, "room for 2 rows from 1 on"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], message: str):
    """Before anything is kept."""
    keys = torch.zeros(2, 2, 5, 8)
    given = {
        "q": torch.zeros(2, 1, 4, 8),
        "k": torch.ones(2, 1, 2, 8),
        "v": torch.ones(2, 1, 2, 8),
        "keys": keys,
        "values": torch.zeros(2, 2, 5, 8),
        "places": torch.tensor([1, 2]),
        "turns": None,
        **changed,
    }
    if not library.build_info()["extension"]:
        pytest.skip("plain torch has no such checks")
    first_row = given.pop("first_row", 0)
    q, k, v, first, second, places, turns = given.values()
    with pytest.raises(RuntimeError, match=message):
        token_attention_((q, k, v), (first, second), places, turns, first_row=first_row)
    assert (keys == 0).all()
