"""What the compiler makes of the Triton kernels for sm_90, within bounds, and how many kernels it
has to make for a training whose batches differ. .ci/triton_facts.sh looks at all cases, also under
the oldest Triton that a supported torch brings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.ops.machine_code.ahead import variants
from benchmarks.ops.machine_code.triton_cases import TRITON, WITH_PRODUCTS, empty
from benchmarks.ops.machine_code.triton_facts import (
    BOUNDS,
    EXPLAINED,
    PRODUCTS,
    Facts,
    Reason,
    beyond,
    compare,
    facts,
    kept_cases,
    main,
)
from pyops.ops.triton import activation, cross_entropy

pytestmark = pytest.mark.cpu_only

# A case of each kernel, and those of which there was something wrong.
CASES = {
    "rms 4096 bf16",
    "add layer back 8192 bf16",
    "rms back 16384 fp32",
    "gelu bf16",
    "gelu back bf16",
    "swiglu bf16",
    "swiglu back fp32",
    "statistics 131072 bf16",
    "gradient 32000 bf16",
    "bias dropout add bf16",
    "back bf16",
    "part of rows bf16",
    "pairs bf16",
    "2:4 bf16",
    "upper bits fp32",
    "kept bf16",
    "rows to codes bf16",
    "sums of codes bf16",
    "one row by int4 bf16",
    "rounded back bf16",
}


# Those that the suite itself compiles.
SLOW, AHEAD = "statistics 131072 bf16", "add layer back 8192 bf16"


@pytest.fixture(scope="module")
def found() -> dict[str, Facts]:
    return facts({SLOW, AHEAD})


def launched(folder: Path) -> set[str]:
    """The kernels that the modules of a folder launch."""
    kernels = set()
    for path in folder.glob("*.py"):
        text = path.read_text()
        kernels |= set(re.findall(r"^ +_(\w+)\[", text, re.MULTILINE))
        kernels |= set(re.findall(r"(?:_launch|_gradients)\(\s*_(\w+),", text))
    return kernels


def test_registers_spills_and_instructions(found):
    wrong = {name: beyond(name, of) for name, of in found.items() if beyond(name, of)}
    assert not wrong
    # The next row is on its way while this one is summed: a row alone is 48 KiB.
    assert found["norm: add layer back 8192 bf16: rows_backward"]["ahead"] >= 96


def test_every_kernel_has_bounds():
    folder = Path(activation.__file__).parent
    kernels = {name.split(": ")[-1] for name in BOUNDS} | {"column_sum"}
    assert kernels == launched(folder) | launched(folder / "sparse"), "a kernel without bounds"
    of_products = {name.split(": ")[-1] for name in PRODUCTS}
    assert of_products == launched(folder / "attention"), "a kernel without bounds"


def test_a_case_that_is_left_out_has_another_of_its_kernels_beside_it():
    def kind(name: str) -> str:
        return re.sub(r"^(causal|dropout|bias) (?=\d)|\d+|bf16|fp32", "", name)

    every = {case.name for of_stem in (TRITON | WITH_PRODUCTS).values() for case in of_stem()}
    kept = kept_cases()
    assert len(kept) < len(every) * 2 / 3
    assert {kind(name) for name in kept} == {kind(name) for name in every}
    launches = [name.split(": ") for name in PRODUCTS]
    kernels = {kernel for _, case, kernel in launches if case in kept}
    assert kernels == {kernel for *_, kernel in launches}


@pytest.mark.full  # .ci/triton_facts.sh looks at them all
def test_registers_spills_and_instructions_of_every_kernel():
    """Drawing a block of Philox in each of four threads took 213 registers and 179 instructions of
    `bias dropout add`; erf 28 of gelu."""
    found = facts(CASES)
    wrong = {name: beyond(name, of) for name, of in found.items() if beyond(name, of)}
    assert not wrong
    folder = Path(activation.__file__).parent
    kernels = {name.split(": ")[-1] for name in found}
    assert kernels == launched(folder) | launched(folder / "sparse"), "a kernel without a case"


def test_what_is_beyond_its_bounds_is_said():
    name = "norm: rms 4096 bf16: rows_forward"
    fine = {"registers": 32, "local": 0, "issue": 15.0, "ahead": 64.0, "percent": 90.0}
    assert not beyond(name, fine)
    assert beyond(name, fine | {"registers": 64}) == "registers 64, at most 40"
    assert beyond(name, fine | {"issue": 60.0}) == "issue 60, at most 19"
    assert beyond(name, fine | {"local": 8}) == "local 8, at most 0"
    with pytest.raises(KeyError):
        beyond("norm: another 4096 bf16: rows_forward", fine)


ONE = {
    "registers": 32,
    "warps": 64,
    "local": 0,
    "issue": 15.0,
    "width": 16.0,
    "ahead": 64.0,
    "percent": 90.0,
}
# What is not alike; the first is: as many CTAs, and enough ahead.
OTHERS = {
    "": {"registers": 39, "ahead": 96.0},
    "warps": {"warps": 48},
    "local": {"local": 4},
    "issue": {"issue": 17.0},
    "width": {"width": 8.0},
    "ahead": {"ahead": 52.0},
    "percent": {"percent": 75.0},
}


def test_two_compilers_beside_each_other(tmp_path, capsys, monkeypatch):
    name = "norm: rms 4096 bf16: rows_forward"
    assert compare({name: ONE}, {name: ONE}) == ([], [])
    files = []
    for key, of in OTHERS.items():
        for pair in ((ONE, ONE | of), (ONE | of, ONE)):
            explained, wrong = compare({name: pair[0]}, {name: pair[1]})
            assert not explained
            assert [line.split("not alike in ")[1] for line in wrong] == ([key] if key else [])
        files.append(str(tmp_path / f"{len(files)}.json"))
        made = {"triton": f"3.{len(files)}", "facts": {name: ONE | of}}
        Path(files[-1]).write_text(json.dumps(made))
    assert [main([files[0], file]) for file in files] == [0, *[1] * 6]
    said = capsys.readouterr()
    assert "1 of 1 launches are alike within a tenth in what costs time under Triton" in said.out
    assert "0 of 1 launches" in said.out
    assert f"Triton 3.3, {name}: local 4, at most 0" in said.err
    with pytest.raises(ValueError, match="launches of only one"):
        compare({name: ONE}, {})

    # A reason is for what it names alone, and for what differs.
    monkeypatch.setitem(EXPLAINED, name, Reason({"warps"}, "for a reason"))
    explained, wrong = compare({name: ONE}, {name: ONE | OTHERS["warps"]})
    assert not wrong
    assert explained[0].endswith("not alike in warps: for a reason")
    _, wrong = compare({name: ONE}, {name: ONE | OTHERS["warps"] | OTHERS["local"]})
    assert wrong[0].endswith("not alike in local and warps")
    unneeded = f"{name}: alike in warps, which is explained"
    assert compare({name: ONE}, {name: ONE}) == ([], [unneeded])


@pytest.mark.full
def test_a_slow_kernel_is_not_alike(found, monkeypatch):
    """One warp for what eight have: most of a multiprocessor's threads find no registers."""
    name = "cross_entropy: statistics 131072 bf16: statistics"
    monkeypatch.setattr(cross_entropy, "STATISTICS_WARPS", 1)
    slow = facts({SLOW})
    assert slow.keys() == {name}
    _, wrong = compare({name: found[name]}, slow)
    assert "warps" in wrong[0].split("not alike in ")[1]
    assert "registers" in beyond(name, slow[name])


# Many tiles for a program, and few
ROWS = [16 * k for k in range(1, 200)] + [16384 * k for k in range(1, 40)] + [777, 4095]


def test_few_kernels_for_many_numbers_of_tokens():
    """Sixteen of each kind at most: a number that is 1, divisible by 16 or neither."""
    from pyops.ops.triton import activation, dropout, norm

    state, weight = empty(2, dtype=torch.int64), empty(1024)

    def call() -> None:
        for rows in ROWS:
            x, statistic = empty(rows, 1024), empty(rows, dtype=torch.float32)
            norm.layer_norm_backward(x, None, x, weight, statistic, statistic, weight_grad=True)
            activation.bias_activation_backward(x, x, weight, activation="gelu", bias_grad=True)
            dropout.bias_dropout_add_backward(x, state, p=0.1, bias_grad=True)

    kinds: dict[str, int] = {}
    for text in variants(call):
        name = text.split("'")[1]
        kinds[name] = kinds.get(name, 0) + 1
    assert len(kinds) == 5
    assert max(kinds.values()) <= 16, kinds


def test_one_kernel_for_a_schedule_of_dropout():
    from pyops.ops.triton import dropout

    x, state = empty(64, 1024), empty(2, dtype=torch.int64)

    def call() -> None:
        for k in range(1, 100):
            dropout.bias_dropout_add(x, None, x, state, p=k / 200)

    assert len(variants(call)) == 1
