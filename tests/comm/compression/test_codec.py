"""Codecs by themselves: what is written plus what is left out is what was given."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from pyops import comm as codecs
from pyops.comm import Communicator, compressed_all_reduce
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.eight_bit import FP8, Int4, Int8
from pyops.comm.compression.floats import BF16, Identity
from pyops.comm.compression.names import parse
from pyops.comm.compression.one_bit import OneBit

EXACT: list[Codec] = [Identity(), BF16(), Int8(), Int4(), FP8(), FP8(format="e5m2", block=64)]
SIGNS: list[Codec] = [OneBit(), OneBit(block=64), OneBit(block=64, rule="rms"), OneBit(block=None)]


def numbers(seed: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 5003])
@pytest.mark.parametrize("codec", EXACT + SIGNS, ids=lambda c: c.name)
def test_decoded_plus_error_is_what_was_given(codec: Codec, size: int) -> None:
    x, before = numbers(1, size), 0.1 * numbers(2, size)
    error, out = before.clone(), torch.empty(size)
    payload = torch.full((codec.payload_bytes(size),), 255, dtype=torch.uint8)
    codec.encode(x, payload, error=error)
    codec.decode(payload, out)
    given, left = (x + before).double(), error.double()
    slack = 2.0**-24 * left.abs() if codec in SIGNS else 0.0  # the new error is rounded once
    assert ((out.double() + left - given).abs() <= slack).all()


@pytest.mark.parametrize("codec", EXACT + SIGNS, ids=lambda c: c.name)
def test_reencoding_is_the_sum_encoded(codec: Codec) -> None:
    rows = []
    for seed in range(3):
        rows.append(torch.empty(codec.payload_bytes(500), dtype=torch.uint8))
        codec.encode(numbers(seed, 500), rows[-1])
    total, once, twice = torch.empty(500), torch.empty_like(rows[0]), torch.empty_like(rows[0])
    codec.sum_rows(total, rows, scale=0.25)
    left_once, left_twice = numbers(9, 500), numbers(9, 500)
    codec.reencode(once, rows, n=500, scale=0.25, error=left_once)
    codec.encode(total, twice, error=left_twice)
    assert torch.equal(once, twice)
    assert torch.equal(left_once, left_twice)
    parts = torch.zeros(500)
    for row in rows:
        one = torch.empty(500)
        codec.decode(row, one)
        parts += one
    assert torch.equal(total, parts * 0.25)


def test_one_bit_by_hand() -> None:
    x = torch.tensor([3.0, -1.0, 0.0, 2.0])
    error, out = torch.zeros(4), torch.empty(4)
    payload = torch.empty(5, dtype=torch.uint8)
    OneBit(block=64).encode(x, payload, error=error)
    OneBit(block=64).decode(payload, out)
    assert out.tolist() == [1.5, -1.5, 1.5, 1.5]  # sgn(0) = +1
    assert error.tolist() == [1.5, 0.5, -1.5, 0.5]


def test_four_bits_by_hand() -> None:
    x = torch.tensor([7.0, -3.4, 0.0, 2.6, float("nan")])
    error, out, flag = torch.zeros(5), torch.empty(5), torch.zeros(1)
    payload = torch.empty(4 + 3, dtype=torch.uint8)
    Int4().encode(x[:4], payload[:6], error=error[:4], flag=flag)
    Int4().decode(payload[:6], out[:4], scale=2.0)
    assert out[:4].tolist() == [14.0, -6.0, 0.0, 6.0]
    assert torch.allclose(error, torch.tensor([0.0, -0.4, 0.0, -0.4, 0.0]))
    assert payload[4:6].tolist() == [15 | 5 << 4, 8 | 11 << 4]
    assert flag.item() == 0
    before = error.clone()
    Int4().encode(x, payload, error=error, flag=flag)
    Int4().decode(payload, out)
    assert out.isnan().all()  # the whole block
    assert torch.equal(error, before)
    assert flag.item() == 1


def test_names() -> None:
    assert parse("onebit") == OneBit()
    assert parse("fp8_e5m2") == FP8(format="e5m2")
    with pytest.raises(ValueError, match=r"no codec 'zip'.*onebit"):
        parse("zip")
    for make in (
        lambda: OneBit(block=100),
        lambda: Int8(block=0),
        lambda: Int4(block=32),
        lambda: OneBit(rule="l2"),
        lambda: FP8(format="e3m4"),
    ):
        with pytest.raises(ValueError, match=r"give a multiple of 64|choose"):
            make()


def _counted(rank: int, group: object) -> dict[str, int]:
    comm = Communicator.of(group)  # type: ignore[arg-type]
    found = {}
    for name in ("identity", "int8", "onebit"):
        before = comm.bytes_sent
        compressed_all_reduce(numbers(rank, 1_000_003), codec=parse(name), communicator=comm)
        found[name] = comm.bytes_sent - before
    return found


def test_bytes_sent(world) -> None:
    first, second = world(2).run(_counted)
    for found in (first, second):
        assert abs(found["identity"] - 4_000_012) < 20_000  # twice a half
        assert found["identity"] / found["onebit"] > 30
        assert found["identity"] / found["int8"] > 3.8


def test_the_codecs_of_the_documentation_are_found_where_it_says():
    page = (Path(__file__).resolve().parents[3] / "docs" / "compression.md").read_text()
    table = page.split("All codecs are found in `pyops.comm`:")[1].split("\n\n")[1]
    names = re.findall(r"^\| `(\w+)\(", table, re.MULTILINE)
    assert {"Identity", "BF16", "Int8", "Int4", "FP8", "OneBit", "TopK", "PowerSGD"} == set(names)
    for name in names:
        assert issubclass(getattr(codecs, name), codecs.Codec), name
    with pytest.raises(
        AttributeError, match=r"module 'pyops.comm' has no attribute 'LowRank'; it has"
    ):
        _ = codecs.LowRank


def test_every_import_that_the_page_on_compression_prints():
    page = (Path(__file__).resolve().parents[3] / "docs" / "compression.md").read_text()
    printed = re.findall(r"^ *from (pyops[\w.]*) import ([\w, ]+)$", page, re.MULTILINE)
    assert len(printed) > 3
    for module, names in printed:
        for name in names.replace(" ", "").split(","):
            assert getattr(importlib.import_module(module), name) is not None
