"""Context parallelism, offload, codecs of gradients: what they cost, and when they are chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyops.comm import Int8
from pyops.config import load_config, plan_for_run
from pyops.plan import (
    PYOPS,
    Case,
    Layout,
    ModelShape,
    Options,
    Plan,
    PlanError,
    best,
    load_cluster,
    memory,
    step_time,
)
from pyops.plan.costs.codecs import codec_bytes, codec_memory
from pyops.plan.costs.context import received
from tests.plan.shapes import LLAMA_8B, gpt, llama

pytestmark = pytest.mark.cpu_only

H100 = load_cluster("h100")
LONG = replace(LLAMA_8B, sequence_length=131072, name="Llama 3, long rows")


def on(shape: ModelShape, devices: int, **options: Any) -> Plan:
    return best(shape, H100.with_devices(devices), Options(**options))


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        # 32 heads and 8 of keys, 128 wide; 8,192 tokens on 4 ranks.
        ("gather", 2 * 8192 * 1024 * 3 / 4, 2 * 2 * 8192 * 1024 * 3 / 4),
        ("ulysses", (2 * 4096 + 2 * 1024) * 2048 * 3 / 4, (2 * 4096 + 2 * 1024) * 2048 * 3 / 4),
        ("ring", 2 * 8192 * 1024 * 3 / 4, 2 * 8192 * 1024 * 3 / 4),
    ],
)
def test_what_ranks_of_cp_receive(method: str, forward: float, backward: float):
    layout = Layout(cp=4, cp_method=method)
    cost = received(LLAMA_8B, layout, precision="bf16")
    sums = 4 * 2 * 8192 * 1024 if method == "ring" else 0  # gradients in fp32
    assert cost.forward.received_bytes == 2 * forward
    assert cost.backward.received_bytes == 2 * backward + sums
    half = received(LLAMA_8B, replace(layout, tp=2), precision="fp32")
    assert half.forward.received_bytes == 2 * forward


def test_few_heads_of_keys_are_copied_to_the_ranks_that_exchange_heads():
    one, eight = (
        received(
            replace(LLAMA_8B, num_kv_heads=k), Layout(cp=8, cp_method="ulysses"), precision="bf16"
        )
        for k in (1, 8)
    )
    assert one.forward == eight.forward


def test_long_rows_fit_where_ranks_share_their_tokens():
    """131,072 tokens of 8 billion parameters on one node."""
    without = on(LONG, 8, batch=4, fixed={"cp": 1})
    found = on(LONG, 8, batch=4)
    assert found.layout.cp > 1
    assert found.best.seconds < without.best.seconds
    assert memory(LONG, Layout(cp=2), PYOPS).activations < (
        0.51 * memory(LONG, Layout(), PYOPS).activations
    )
    assert dict(found.reasons)["experts (ep)"].startswith("the model has none")


def test_short_rows_are_not_shared_out():
    found = on(LLAMA_8B, 8, batch=64)
    assert found.layout.cp == 1
    assert "cp 2 x dp 4" in dict(found.reasons)["context parallelism (cp)"]
    gathered = on(LLAMA_8B, 8, batch=64, fixed={"cp": 2, "cp_method": "gather"})
    assert gathered.best.seconds > found.best.seconds


def test_ranks_of_cp_share_states_and_tokens():
    one = Layout(dp=4, zero=1)
    both = Layout(dp=2, cp=2, zero=1)
    assert memory(LLAMA_8B, one, PYOPS).states == memory(LLAMA_8B, both, PYOPS).states
    case = Case(LLAMA_8B, H100.with_devices(4), PYOPS)
    assert step_time(case, both).products == pytest.approx(step_time(case, one).products / 2)
    assert step_time(case, both).context_messages > 0
    assert step_time(case, one).context_messages == 0


def test_a_ring_hides_its_messages_behind_attention():
    case = Case(LONG, H100.with_devices(8), PYOPS)
    ring, gather = (
        step_time(case, Layout(cp=8, cp_method=method)).context_messages
        for method in ("ring", "gather")
    )
    assert 0 < ring < gather / 2


def test_states_move_to_the_host_where_nothing_else_fits():
    """70 billion parameters on one node: 16 bytes each are 1.1 TB, of which 8 x 80 GB hold 0.5."""
    shape = llama(80, 8192, 64, 28672)
    found = on(shape, 8, batch=8)
    assert found.layout.offload == "cpu"
    assert 'offload = "cpu"' in found.toml()
    assert "offload='cpu'" in found.code()
    assert found.best.memory.states <= 3 * (32 << 20)
    beside = replace(found.layout, offload="none")
    assert step_time(Case(shape, H100, PYOPS), beside).optimizer < found.best.time.optimizer
    small = replace(H100.host, memory_gib=8.0)
    with pytest.raises(PlanError, match="fits on no layout"):
        best(shape, replace(H100, host=small).with_devices(8), Options(batch=8))
    with pytest.raises(PlanError, match="fits on no layout"):
        best(shape, replace(H100, host=None).with_devices(8), Options(batch=8))


def test_codecs_say_their_bytes():
    shape = gpt(24, 1024, 16)
    assert codec_bytes("none", shape, exact=2.0) == 2.0
    assert codec_bytes("bf16", shape, exact=4.0) == 2.0
    assert codec_bytes("int8", shape, exact=4.0) == Int8().payload_bytes(256) / 256
    assert codec_bytes("onebit", shape, exact=4.0) == 1 / 8 + 4 / 2048
    assert codec_bytes("topk", shape, exact=4.0) == pytest.approx(0.08, rel=1e-3)
    assert 0 < codec_bytes("power_sgd", shape, exact=4.0) < 0.1
    assert codec_memory("none", copies=4) == 0.0
    assert codec_memory("int8", copies=4) == 5.0


def test_compressed_gradients_are_offered_and_taken_when_asked_for():
    shape = gpt(12, 768, 12)
    slow = replace(H100, network=replace(H100.network, bandwidth=0.125e9)).with_devices(16)
    exact = best(shape, slow, Options(batch=256))
    why = dict(exact.reasons)["gradients as int8"]
    assert exact.layout.codec == "none"
    assert "faster" in why
    assert "--codec int8" in why
    found = best(shape, slow, Options(batch=256, codecs=("int8",)))
    assert found.layout.codec == "int8"
    assert found.best.seconds < exact.best.seconds
    assert found.code() == "DataParallel(model, codec=Int8())"
    assert '[communication]\ncodec = "int8"' in found.toml()
    with pytest.raises(PlanError, match=r"which a ParallelPlan has not; .* codec=Int8\(\)"):
        found.parallel_plan()
    assert best(shape, slow, Options(batch=256, fixed={"codec": "onebit"})).layout.codec == "onebit"


@pytest.mark.parametrize(
    "fixed",
    [
        {"cp": 2, "cp_method": "ring", "zero": 1},
        {"cp": 2, "tp": 2, "cp_method": "ulysses", "pp": 1},
        {"zero": 2, "offload": "cpu", "tp": 1},
        {"codec": "int8"},
    ],
    ids=str,
)
def test_the_file_of_such_a_plan_is_what_pyops_train_takes(tmp_path: Path, fixed: dict[str, Any]):
    model = {"vocab_size": 8192, "sequence_length": 4096, "num_layers": 4, "num_heads": 8}
    shape = ModelShape.of_numbers({**model, "dim": 512})
    device = replace(H100.device, memory_gib=3.0) if "offload" in fixed else H100.device
    found = best(
        shape,
        replace(H100, device=device).with_devices(4),
        Options(batch=64, fixed=fixed, memory_part=1.0),
    )
    file = tmp_path / "plan.toml"
    file.write_text(found.toml(model={**model, "dim": 512}))
    config = load_config(file)
    config.check_ranks(4)
    theirs = plan_for_run(config, num_rows=64 // found.layout.dp)
    assert config.communication.codec == fixed.get("codec", "none")
    assert config.zero.offload == theirs.zero.offload == fixed.get("offload", "none")
    assert config.parallel.cp_method == found.layout.cp_method
    if "codec" not in fixed:
        ours = found.parallel_plan()
        ours.validate()
        ours.axes(4)
        assert (ours.cp, ours.tp, ours.zero.stage) == (theirs.cp, theirs.tp, theirs.zero.stage)
        assert ours.cp == fixed.get("cp", 1)


def test_other_schedules_are_compared():
    found = on(llama(80, 8192, 64, 28672), 64, batch=128, fixed={"pp": 4})
    why = dict(found.reasons)
    others = {f"schedule {name}" for name in ("1f1b", "zb1p", "zbv", "interleaved")}
    others.discard(f"schedule {found.layout.schedule}")
    assert others <= set(why)
    assert all("slower" in why[name] or "GiB" in why[name] for name in others)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(cp_method="ring"), "cp_method is 'ring' with cp 1; leave it out"),
        (
            Layout(cp=2, cp_method="star"),
            "cp_method is 'star'; choose one of gather, ring, ulysses",
        ),
        (Layout(offload="cpu"), "offload is 'cpu' with zero 0"),
        (Layout(codec="int8"), "codec is 'int8', but gradients travel compressed between whole"),
        (Layout(dp=2, zero=1, codec="int8"), "this is dp 2, ZeRO 1; leave codec out"),
        (Layout(dp=2, tp=2, codec="int8"), "this is tp 2 x dp 2, ZeRO 0; leave codec out"),
    ],
)
def test_what_does_not_go_together_is_refused(layout: Layout, message: str):
    with pytest.raises(PlanError, match=message):
        layout.validate()


def test_fp8_and_unknown_codecs_are_refused():
    with pytest.raises(PlanError, match="precision is 'fp8': pyops has no products in fp8; choose"):
        on(LLAMA_8B, 8, precision="fp8")
    with pytest.raises(PlanError, match="codecs has 'zip'; choose among none, bf16"):
        on(LLAMA_8B, 8, codecs=("zip",))
    assert dict(on(LLAMA_8B, 8, batch=16).reasons)["fp8"].startswith("pyops computes no products")
