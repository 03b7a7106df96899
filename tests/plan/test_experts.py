"""Models with experts are counted, by transformers' parameters and published figures, and no
layout is planned for them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from benchmarks.plan.published_counts import COUNTS, DEEPSEEK, GPT_OSS, PAGE, QWEN_30B, Count, fill
from pyops.cli.planning import add_plan, plan
from pyops.plan import (
    PYOPS,
    Experts,
    ExpertShape,
    LatentAttention,
    Layout,
    ModelShape,
    Options,
    PlanError,
    best,
    expert_state_bytes,
    load_cluster,
)
from pyops.plan.shapes.decoder import EXPERT_KINDS

pytestmark = pytest.mark.cpu_only

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 6, "head_dim": 16},
    "deepseek_v3": {
        "n_routed_experts": 6,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 10,
        "n_group": 1,
        "topk_group": 1,
    },
}


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **OWN[kind], **changes})
    found: dict[str, Any] = json.loads(config.to_json_string())
    return found


def counted(values: dict[str, Any]) -> int:
    config = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_parameters_are_those_of_transformers(kind: str):
    values = config_of(kind)
    shape = ExpertShape.of_config(values)
    assert shape.num_parameters == counted(values)
    idle = shape.blocks * (6 - 2) * shape.expert_parameters
    assert shape.active_parameters == shape.num_parameters - idle


def test_queries_that_come_of_the_token_and_a_tied_head():
    values = config_of("deepseek_v3", q_lora_rank=None, tie_word_embeddings=True)
    assert ExpertShape.of_config(values).num_parameters == counted(values)


@pytest.mark.parametrize("count", COUNTS, ids=lambda count: count.shape.name)
def test_counts_are_those_published(count: Count):
    """Parameters to the printed digits, operations of a token within what is printed of a run's
    TFLOP/s; active parameters to a digit less, since conventions differ."""
    digits = len(count.billions.partition(".")[2])
    assert f"{count.shape.num_parameters / 1e9:.{digits}f}" == count.billions
    assert count.counted_active == pytest.approx(float(count.active), rel=0.025)
    low, high = count.published_operations
    assert low <= count.operations <= high
    assert high - low < 0.003 * count.operations


def test_the_page_has_the_counts():
    page = PAGE.read_text()
    assert "<!-- counts:experts -->" in page
    assert fill(page) == page, "run python -m benchmarks.plan.published_counts"


def test_a_dense_decoder_is_one_expert_that_every_token_uses():
    """But for the router, which has one row, and counts neither here nor there."""
    decoder = replace(QWEN_30B.decoder, hidden=768)
    one = ExpertShape(decoder, Experts(number=1, per_token=1, hidden=768))
    router = decoder.num_layers * decoder.dim
    assert one.num_parameters == decoder.num_parameters + router == one.active_parameters
    norms = 6 * (2 * decoder.num_layers + 1) * decoder.dim
    for causal in (False, True):
        assert one.operations(causal=causal) == decoder.operations(causal=causal) - norms


def test_longer_rows_have_more_scores():
    long = GPT_OSS.with_sequence(16384)
    more = 12 * 36 * 4096 * (16384 - 8192)
    assert long.operations() - GPT_OSS.operations() == more


def states(layout: Layout, *, ep: int, shape: ExpertShape = DEEPSEEK) -> float:
    return sum(expert_state_bytes(shape, layout, PYOPS, ep=ep))


def test_states_of_experts_are_shared_among_fewer_copies():
    """16 bytes a parameter; 14 and 12 of them by the copies of ZeRO 2 and 1, which experts have
    fewer of: n / (p e)."""
    whole, common = DEEPSEEK.num_parameters, DEEPSEEK.common_parameters
    assert states(Layout(), ep=1) == 16 * whole
    assert states(Layout(dp=64), ep=64) == 16 * (common + (whole - common) / 64)
    for ep in (8, 64):
        found = states(Layout(dp=64, zero=1), ep=ep)
        one = (4 + 12 / 64) * common + (4 + 12 * ep / 64) * (whole - common) / ep
        assert found == pytest.approx(one)
    assert states(Layout(dp=64, zero=3), ep=64) == pytest.approx(
        16 * (common / 64 + (whole - common) / 64)
    )
    # Experts are whole on the ranks of tp, which are copies of them.
    cut = states(Layout(tp=8, dp=8, zero=1), ep=64)
    assert cut == pytest.approx((4 + 12 / 8) * common / 8 + 16 * (whole - common) / 64)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ((Layout(dp=64), 64), (Layout(dp=64), 8)),
        ((Layout(dp=64, zero=1), 8), (Layout(dp=64), 8)),
        ((Layout(dp=64, tp=2), 8), (Layout(dp=64), 8)),
        ((Layout(dp=64, pp=2, schedule="1f1b"), 8), (Layout(dp=64), 8)),
    ],
)
def test_states_fall_with_what_shares_them_out(less: Any, more: Any):
    assert states(less[0], ep=less[1]) < states(more[0], ep=more[1])


def test_no_layout_is_planned(tmp_path, capsys):
    words = "128 experts in a block, 8 for each token: 30.5 billion parameters, 3.35 billion of "
    with pytest.raises(PlanError, match=words) as refused:
        best(QWEN_30B, load_cluster("h100").with_devices(16), Options(batch=512))  # type: ignore[arg-type]
    assert "no layer of experts and no expert parallelism (ep)" in str(refused.value)
    dense = ModelShape.of_numbers(
        {"num_layers": 2, "dim": 64, "num_heads": 4, "vocab_size": 96, "sequence_length": 32}
    )
    with pytest.raises(PlanError, match="fixed has ep=2: pyops has no layer of experts"):
        best(dense, load_cluster("h100").with_devices(2), Options(batch=4, fixed={"ep": 2}))
    with pytest.raises(PlanError, match=r"ep is 3, which does not divide the 256 experts"):
        states(Layout(dp=6), ep=3)
    with pytest.raises(PlanError, match=r"ep is 64, which does not divide the 8 ranks of a stage"):
        states(Layout(dp=8), ep=64)


def test_a_folder_of_a_model_with_experts_is_refused_with_its_counts(tmp_path):
    import argparse

    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of("mixtral")))
    with pytest.raises(PlanError, match="model_type 'mixtral', whose blocks have experts: pyops"):
        ModelShape.of_folder(tmp_path)
    assert ExpertShape.of_folder(tmp_path).experts.number == 6
    parser = argparse.ArgumentParser()
    add_plan(parser)
    given = parser.parse_args([str(tmp_path), "--cluster", "h100", "--devices", "8"])
    with pytest.raises(PlanError, match=r"6 experts in a block, 2 for each token: .* parameters"):
        plan(given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Experts(0, 1, 8), "number is 0; give a whole number, 1 or more"),
        (lambda: Experts(4, 5, 8), "per_token is 5, but there are 4 experts; give that many"),
        (lambda: Experts(4, 2, 8, first=-1), "first is -1; give a whole number, 0 or more"),
        (lambda: LatentAttention(-1, 8, 8, 8, 8), "query_rank is -1; give a whole number, 0"),
        (lambda: LatentAttention(0, 8, 8, 8, 0), "values is 0; give a whole number, 1 or more"),
        (
            lambda: ExpertShape.of_config({"model_type": "jamba"}),
            "model_type 'jamba'; models with experts that are counted are mixtral, qwen3_moe",
        ),
        (
            lambda: ExpertShape.of_config(config_of("qwen3_moe", decoder_sparse_step=2)),
            "decoder_sparse_step = 2, mlp_only_layers = .*: experts in some blocks only",
        ),
        (
            lambda: ExpertShape.of_config({**config_of("deepseek_v3"), "attention_bias": True}),
            "attention_bias = True, which is not counted of a latent attention",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, message: str):
    with pytest.raises(PlanError, match=message):
        make()
