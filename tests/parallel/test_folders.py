"""A Hugging Face folder in, a trained one out: each rank reads and writes its own part."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.optim import AdamW
from pyops.parallel import ParallelPlan, PipelineOptions, parallelize
from pyops.zero import ZeroConfig
from tests.grids import cut
from tests.parallel.test_trainer import close, own_rows, rows_for
from tests.parallel.tiny_transformers import batch_for, make_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.cpu_only

PLANS = {
    "one": (1, ParallelPlan()),
    "tp 2": (2, ParallelPlan(tp=2)),
    "pp 2": (2, ParallelPlan(pp=2, pipeline=PipelineOptions("interleaved", stages_per_rank=2))),
    "dp 2, zero 3": (2, ParallelPlan(zero=ZeroConfig(stage=3))),
    "tp 2 x pp 2": (4, ParallelPlan(tp=2, pp=2)),
    "bf16": (2, ParallelPlan(pp=2, precision="bf16")),
}
STEPS = 4


def trained(rank: int, group: object, model: Any, name: str, plan: ParallelPlan, out: Path) -> Any:
    trainer = parallelize(model, plan, optimizer=partial(AdamW, lr=3e-3), seed=7)
    index, copies = trainer.mesh.rank("dp"), trainer.mesh.size("dp")
    losses = [trainer.step(own_rows(rows_for(name, n), index, copies)) for n in range(STEPS)]
    trainer.save_pretrained(out)
    return losses, sum(p.numel() for p in trainer.model.parameters())


def logits_of(folder: Path, name: str) -> Tensor:
    kind = type(make_model(name))
    model = kind.from_pretrained(folder).eval()
    batch = batch_for(name, rows=2, seed=50)
    labels = batch.pop("labels")
    if name == "t5":
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize(
    ("name", "plan"),
    cut(
        [
            *[("llama", plan) for plan in PLANS if plan != "bf16"],
            ("llama tied", "tp 2 x pp 2"),
            ("gpt2", "tp 2 x pp 2"),
            ("t5", "pp 2"),
            ("bert", "tp 2"),
            ("vit", "dp 2, zero 3"),
            ("qwen3", "pp 2"),
        ],
        keep=[
            ("llama", "one"),
            ("llama tied", "tp 2 x pp 2"),
            ("bert", "tp 2"),
            ("vit", "dp 2, zero 3"),
        ],
    ),
)
def test_a_folder_becomes_a_trained_folder(name, plan, world, tmp_path):
    no_dropout: dict[str, Any] = {
        "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "t5": {"dropout_rate": 0.0},
    }.get(name, {})
    make_model(name, **no_dropout).save_pretrained(tmp_path / "before")
    expected, _ = trained(
        0, None, make_model(name, **no_dropout), name, ParallelPlan(), tmp_path / "plain"
    )
    ranks, chosen = PLANS[plan]
    body = partial(trained, 0, None) if ranks == 1 else partial(world(ranks).run, trained)
    found = body(tmp_path / "before", name, chosen, tmp_path / "after")
    for losses, _ in [found] if ranks == 1 else found:
        close(losses, expected)
    torch.testing.assert_close(
        logits_of(tmp_path / "after", name), logits_of(tmp_path / "plain", name), atol=2e-4, rtol=0
    )
    moved = logits_of(tmp_path / "after", name) - logits_of(tmp_path / "before", name)
    assert moved.abs().max() > 1e-2, "nothing was trained"


def test_ranks_hold_their_part_alone(world, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "before")
    whole = sum(p.numel() for p in make_model("llama").parameters())
    held = [
        numel
        for _, numel in world(4).run(
            trained, tmp_path / "before", "llama", ParallelPlan(tp=2, pp=2), tmp_path / "after"
        )
    ]
    assert max(held) < whole / 3
    # Norms are on both ranks that share a layer.
    assert whole <= sum(held) < 1.05 * whole


def test_16_bits(world, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "before")
    ranks, plan = PLANS["bf16"]
    found = world(ranks).run(trained, tmp_path / "before", "llama", plan, tmp_path / "after")
    expected, _ = trained(0, None, make_model("llama"), "llama", ParallelPlan(), tmp_path / "plain")
    for losses, _ in found:
        assert losses == pytest.approx(expected, abs=0.05)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype="auto")
    assert saved.dtype == torch.bfloat16
    weights = dict(make_model("llama").bfloat16().named_parameters())
    same = [name for name, p in saved.named_parameters() if torch.equal(p, weights[name])]
    assert not same, "nothing was trained"


def refused(rank: int, group: object, folder: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        parallelize(folder, ParallelPlan(pp=2), optimizer=partial(AdamW, lr=1e-3))
    return str(caught.value)


def test_a_folder_that_can_not_be_read_is_refused_on_all_ranks(world, tmp_path):
    for said in world(2).run(refused, tmp_path / "nothing"):
        assert "nothing" in said
    model = make_model("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    for said in world(2).run(refused, tmp_path / "nan"):
        assert "model.norm.weight" in said
        assert "NaN" in said


def in_fp32(rank: int, group: object, folder: Path, plan: ParallelPlan) -> Any:
    trainer = parallelize(folder, plan, optimizer=partial(AdamW, lr=1e-3))
    loss = trainer.step(batch_for("llama", rows=4))
    return loss, {p.dtype for p in trainer.model.parameters()}


def test_a_folder_of_16_bits_computes_in_32_where_the_plan_says_so(tmp_path, world):
    model = make_model("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    batch = batch_for("llama", rows=4)
    wanted = float(model.float()(**batch).loss.detach())
    for plan in (ParallelPlan(), ParallelPlan(pp=2)):
        for loss, dtypes in world(2).run(in_fp32, tmp_path, plan):
            assert dtypes == {torch.float32}
            assert abs(loss - wanted) < 1e-5
