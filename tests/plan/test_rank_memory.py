"""Memory: against bytes counted in runs, and against the tables of the papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops import recompute
from pyops.models import GPT, GPTConfig
from pyops.optim import SGD, AdamW
from pyops.plan import MEGATRON, PYOPS, Layout, Memory, ModelShape, memory
from pyops.plan.clusters import GIB, load_cluster
from pyops.plan.costs.rank_memory import block_bytes, state_bytes
from pyops.plan.costs.turns import kept
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.plan.shapes import LLAMA_8B, TINY, gpt

pytestmark = pytest.mark.cpu_only

SMALL: dict[str, Any] = {"vocab_size": 48, "sequence_length": 32, "num_layers": 2, "num_heads": 4}
GPTS = {
    "GPT": GPTConfig(**SMALL, dim=64),
    "attention dropout": GPTConfig(**SMALL, dim=64, attention_dropout=0.1),
    "rotary": GPTConfig(**SMALL, dim=64, positions="rotary"),
    "Llama": GPTConfig(
        **SMALL,
        dim=64,
        num_kv_heads=2,
        hidden=160,
        norm="rmsnorm",
        activation="swiglu",
        positions="rotary",
        bias=False,
        tied_head=False,
    ),
}
ROWS = 3


def saved(model: torch.nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes of the storages that autograd keeps, parameters apart."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("how", ["none", "block"])
@pytest.mark.parametrize("name", GPTS)
def test_activations_of_blocks_are_those_counted(name: str, how: str, precision: str):
    """Of two and of four blocks, whose difference is that of two."""
    config, dtype = GPTS[name], torch.bfloat16 if precision == "bf16" else torch.float32
    counted = []
    for layers in (2, 4):
        model = GPT(replace(config, num_layers=layers), dtype=dtype)
        model.set_dropout((ROWS, 32), seed=1, step=0)
        if how == "block":
            recompute.apply(model, ["blocks.*"])
        tokens = torch.zeros(ROWS, 32, dtype=torch.int64)
        counted.append(saved(model, lambda model=model, x=tokens: model(x, x)))
    layout = Layout(micro_batch=ROWS, recompute=how)
    predicted = block_bytes(ModelShape.of_gpt(config), layout, PYOPS, precision=precision)
    assert (counted[1] - counted[0]) / 2 == pytest.approx(predicted, rel=0.003)


def _kept(rank: int, group: Any, stage: int, sgd: bool) -> dict[str, int]:
    model = GPT(replace(GPTS["GPT"], dim=128), dtype=torch.bfloat16)
    cls, options = (SGD, {"momentum": 0.9}) if sgd else (AdamW, {})
    optimizer = ZeroOptimizer(model, cls, ZeroConfig(stage=stage), group=group, lr=1e-3, **options)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    for _ in range(2):
        model(tokens, tokens).backward()
        found = optimizer.memory()
        optimizer.step()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_are_those_that_a_run_keeps(world, stage: int):
    shape = ModelShape.of_gpt(replace(GPTS["GPT"], dim=128))
    cases = [(2, False)] if stage != 1 else [(2, False), (2, True)]
    for size, sgd in cases:
        layout = Layout(dp=size, zero=stage)
        predicted = state_bytes(
            shape.num_parameters, layout, PYOPS, optimizer_bytes=4.0 if sgd else 8.0
        )
        for found in world(size).run(_kept, stage, sgd):
            names = ("parameters", "gradients", "states")
            for name, bytes_of in zip(names, predicted, strict=True):
                assert found[name] == pytest.approx(bytes_of, rel=0.03), name


# Korthikanti et al., arXiv:2205.05198, figure 1: GiB of a rank.
FIGURE_1 = {
    # layers, width, heads, pp, rows, stages of a rank: states, kept, sequence + selective
    "22B": (48, 6144, 64, 1, 4, 1, 45.5625, 59.25, 9.5625),
    "175B": (96, 12288, 96, 8, 1, 3, 45.5625, 66.84375, 12.3515625),
    "530B": (105, 20480, 128, 35, 1, 3, 31.640625, 114.0234375, 23.076171875),
    "1T": (128, 25600, 160, 64, 1, 1, 32.958984375, 131.25, 26.5625),
}
# Figure 7: percent of what is kept: sequence parallel, selective, both, full.
FIGURE_7 = {
    "22B": (66.84, 49.42, 16.18, 7.64),
    "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42),
    "1T": (58.31, 62.04, 20.27, 9.42),
}


def figure_1(name: str, **changes: Any) -> tuple[ModelShape, Layout]:
    layers, width, heads, p, rows, v, *_ = FIGURE_1[name]
    schedule = "none" if p == 1 else "interleaved" if v > 1 else "1f1b"
    values: dict[str, Any] = {
        "tp": 8,
        "pp": p,
        "micro_batch": rows,
        "num_microbatches": 8 * p,
        "schedule": schedule,
        "stages_per_rank": v,
        **changes,
    }
    return gpt(layers, width, heads), Layout(**values)


@pytest.mark.parametrize("name", FIGURE_1)
def test_states_and_activations_equal_figure_1(name: str):
    """All twelve numbers, to every digit: 18 bytes of each of 12 L h^2 / (t p) elements, and the
    activations of the first stage."""
    *_, states, whole, both = FIGURE_1[name]
    shape, layout = figure_1(name)
    elements = shape.num_layers * shape.block_matrices / (layout.tp * layout.pp)
    found = sum(state_bytes(elements, layout, MEGATRON)) / GIB
    assert found == states
    blocks = shape.num_layers / layout.pp * kept(layout, 0)
    assert blocks * block_bytes(shape, layout, MEGATRON) / GIB == pytest.approx(whole, rel=1e-12)
    _, less = figure_1(name, sequence_parallel=True, recompute="attention")
    assert blocks * block_bytes(shape, less, MEGATRON) / GIB == pytest.approx(both, rel=1e-12)


@pytest.mark.parametrize("name", FIGURE_7)
def test_parts_are_those_of_figure_7(name: str):
    shape, layout = figure_1(name)
    whole = block_bytes(shape, layout, MEGATRON)
    changes = (
        {"sequence_parallel": True},
        {"recompute": "attention"},
        {"sequence_parallel": True, "recompute": "attention"},
        {"recompute": "block"},
    )
    for change, published in zip(changes, FIGURE_7[name], strict=True):
        found = 100 * block_bytes(shape, replace(layout, **change), MEGATRON) / whole
        assert found == pytest.approx(published, rel=0.012), change


def test_states_are_those_of_the_zero_paper():
    """Figure 1: 7.5 billion parameters, 64 ranks: 120, 31.4, 16.6, 1.9 GB."""
    for stage, published in enumerate((120, 31.4, 16.6, 1.9)):
        found = sum(state_bytes(7.5e9, Layout(dp=64, zero=stage), PYOPS)) / 1e9
        assert found == pytest.approx(published, abs=0.05)
    assert sum(state_bytes(1e12, Layout(), PYOPS)) == 16e12  # a trillion parameters


def test_parameters_are_those_of_gpipe():
    """GPipe, table 1, Transformer-L: 12 bytes a parameter in GiB; the two rows of Naive-1 are
    exchanged there."""
    table = {"Naive-1": (282.2e6, 3.15), "Pipeline-1": (785.8e6, 8.8), "Pipeline-8": (5.3e9, 59.5)}
    table |= {"Pipeline-32": (21.0e9, 235.1), "Pipeline-128": (83.9e9, 937.9)}
    for column, (count, published) in table.items():
        parameters, gradients, states = state_bytes(
            count, Layout(), PYOPS, precision="fp32", optimizer_bytes=4.0
        )
        assert (parameters + states + gradients) / GIB == pytest.approx(published, rel=0.005), (
            column
        )


def total(layout: Layout, *, shape: ModelShape = LLAMA_8B) -> float:
    return memory(shape, layout, PYOPS, device=load_cluster("h100").device).total


def test_terms_add_up():
    found = memory(LLAMA_8B, Layout(dp=8, zero=1), PYOPS, device=load_cluster("h100").device)
    assert found.total == sum(getattr(found, field.name) for field in fields(Memory))
    assert all(getattr(found, f.name) >= 0 for f in fields(Memory))
    assert found.logits > 0
    assert found.reserved == 2 * GIB
    assert found.fragmentation == pytest.approx(0.05 * (found.total - found.reserved) / 1.05)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (Layout(dp=8, zero=3), Layout(dp=8, zero=2)),
        (Layout(dp=8, zero=2), Layout(dp=8, zero=1)),
        (Layout(dp=8, zero=1), Layout(dp=8, zero=0)),
        (Layout(dp=16, zero=1), Layout(dp=8, zero=1)),
        (Layout(tp=4), Layout(tp=2)),
        (Layout(tp=4, sequence_parallel=True), Layout(tp=4)),
        (Layout(micro_batch=1), Layout(micro_batch=2)),
        (Layout(recompute="block"), Layout()),
        (
            Layout(pp=4, schedule="1f1b", num_microbatches=8),
            Layout(pp=2, schedule="1f1b", num_microbatches=8),
        ),
        (
            Layout(pp=4, schedule="1f1b", num_microbatches=8),
            Layout(pp=4, schedule="gpipe", num_microbatches=8),
        ),
    ],
    ids=str,
)
def test_memory_falls_with_what_shares_it_out(less: Layout, more: Layout):
    assert total(less) < total(more)


def test_longer_rows_take_more():
    assert total(Layout(), shape=TINY.with_sequence(16)) < total(Layout(), shape=TINY)
