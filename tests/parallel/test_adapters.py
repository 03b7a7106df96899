"""LoRA by PEFT on a plan has the losses of PEFT and torch.optim.AdamW on one process; base weights
stay as they were, and PEFT reads the folders."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from pyops import checkpoint
from pyops.optim import AdamW
from pyops.parallel import ParallelPlan, PipelineOptions, parallelize
from pyops.tensor_parallel.convert.check.virtual_ranks import run_virtual
from pyops.tensor_parallel.convert.replacement_plan import ReplacementPlan
from pyops.zero import ZeroConfig
from tests.grids import cut
from tests.parallel.test_trainer import NO_DROPOUT, close, own_rows, rows_for
from tests.parallel.tiny_transformers import batch_for, make_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.cpu_only

STEPS, LR = 6, 3e-3
# {case: (model, options of LoraConfig)}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "q and v": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "all and head": ("llama", {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}),
    "packed": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "tied": ("llama tied", {"target_modules": "all-linear"}),
}
PLANS = {
    "zero 1": (2, ParallelPlan(zero=ZeroConfig(stage=1))),
    "zero 2": (2, ParallelPlan(zero=ZeroConfig(stage=2), num_microbatches=2)),
    "zero 3": (2, ParallelPlan(zero=ZeroConfig(stage=3))),
    "tp 2": (2, ParallelPlan(tp=2)),
    "tp 2, sequence parallel": (2, ParallelPlan(tp=2, sequence_parallel=True)),
    "pp 2": (2, ParallelPlan(pp=2)),
    "pp 2, zb1p": (2, ParallelPlan(pp=2, pipeline=PipelineOptions("zb1p"))),
    "tp 2 x pp 2": (4, ParallelPlan(tp=2, pp=2)),
    "tp 2 x dp 2, zero 1": (4, ParallelPlan(tp=2, zero=ZeroConfig(stage=1))),
    "cp 2": (2, ParallelPlan(cp=2, cp_method="ring")),
    "cp 2 x tp 2": (4, ParallelPlan(cp=2, tp=2, cp_method="ulysses")),
}
# Adapters of all layers on tp 2 stand in tests/train/pretrained/test_folder_training.py.
IN_SUITE = [("q and v", "zero 3"), ("all and head", "pp 2"), ("packed", "tp 2")]


def adapted(case: str, **more: Any) -> Any:
    """The model with adapters that are not 0, as they are when they are made."""
    name, options = ADAPTERS[case]
    base = make_model(name, **NO_DROPOUT[name])
    found = peft.get_peft_model(base, peft.LoraConfig(r=4, **(options | more)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, p in found.named_parameters():
            if "lora_" in key:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return found


@cache
def plain(case: str) -> tuple[list[float], torch.Tensor]:
    """Losses and, after them, logits of PEFT and torch.optim.AdamW."""
    model, name = adapted(case).train(), ADAPTERS[case][0]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=LR), []
    for step in range(STEPS):
        batch = rows_for(name, step)
        labels = batch.pop("labels")[:, 1:].flatten()
        loss = functional.cross_entropy(model(**batch).logits[:, :-1].flatten(0, 1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, logits_of(model, name)


@torch.no_grad()
def logits_of(model: Any, name: str) -> torch.Tensor:
    found: torch.Tensor = model.eval()(batch_for(name, rows=3)["input_ids"]).logits
    return found


def trained(
    rank: int, group: object, case: str, plan: ParallelPlan, folder: Path, **more: Any
) -> list[float]:
    model = adapted(case, **more)
    trainer = parallelize(model, plan, optimizer=partial(AdamW, lr=LR), seed=7)
    index, copies = trainer.mesh.rank("dp"), trainer.mesh.size("dp")
    name = ADAPTERS[case][0]
    losses = [trainer.step(own_rows(rows_for(name, n), index, copies)) for n in range(STEPS)]
    trainer.save(folder / "state")
    trainer.save_pretrained(folder / "adapters")
    trainer.save_pretrained(folder / "adapters")  # in the place of the first
    return losses


@pytest.mark.parametrize(
    ("case", "plan"), cut([(case, plan) for case in ADAPTERS for plan in PLANS], keep=IN_SUITE)
)
def test_adapters_are_trained_as_by_peft_on_one_process(case, plan, world, tmp_path):
    expected, logits = plain(case)
    ranks, chosen = PLANS[plan]
    for losses in world(ranks).run(trained, case, chosen, tmp_path):
        close(losses, expected)
    name, options = ADAPTERS[case]
    again = peft.PeftModel.from_pretrained(make_model(name), tmp_path / "adapters")
    torch.testing.assert_close(logits_of(again, name), logits, rtol=0, atol=1e-5)
    assert (logits_of(adapted(case), name) - logits).abs().max() > 1e-2, "nothing is learnt"
    if "fan_in_fan_out" not in options:  # whose weights lie otherwise in a trainer's checkpoint
        state, _ = checkpoint.load(tmp_path / "state")
        before = dict(adapted(case).get_base_model().named_parameters())
        frozen = [key for key, p in before.items() if not p.requires_grad]
        assert len(frozen) > 20
        assert all(torch.equal(state["model"][key], before[key]) for key in frozen)


def dropped(rank: int, group: object, plan: ParallelPlan, folder: Path) -> list[float]:
    return trained(rank, group, "all and head", plan, folder, lora_dropout=0.3)


@pytest.mark.full  # adapters with dropout have the losses of one process in the file named above
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2), ParallelPlan(cp=2, cp_order="contiguous")])
def test_the_dropout_of_adapters_is_the_same_on_every_layout(plan, world, tmp_path):
    expected = dropped(0, None, ParallelPlan(), tmp_path)
    for losses in world(2).run(dropped, plan, tmp_path):
        close(losses, expected)
    apart = [abs(a - b) for a, b in zip(expected, plain("all and head")[0], strict=True)]
    assert max(apart) > 1e-3, "dropout drops nothing"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "q_proj (peft.tuners.lora.layer.Linear) with DoraLinearVariant is"),
        ({"target_modules": ["lm_head"]}, "leave 'lm_head' out of the adapter's target_modules"),
    ],
)
def test_what_cannot_be_cut_is_refused(options, said: str):
    model = adapted("q and v", **options).get_base_model()

    def planned(group: Any) -> None:
        ReplacementPlan(model, group, None, sequence_parallel=False, gather_logits=True)

    with pytest.raises(ValueError) as error:
        run_virtual(2, planned)
    assert said in str(error.value)


def test_adapters_that_no_folder_could_hold_are_refused(tmp_path, monkeypatch):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    prompts = peft.get_peft_model(make_model("llama"), config)
    added = make_model("llama")
    # transformers 5.24 asks for a PEFT that is not released
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    added.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    for model, said in ((prompts, "LoraConfig"), (added, "give peft.get_peft_model")):
        with pytest.raises(ValueError, match=said):
            parallelize(model, optimizer=AdamW)
    (tmp_path / "notes.txt").write_text("mine")
    trainer = parallelize(adapted("q and v"), optimizer=AdamW)
    with pytest.raises(ValueError, match=r"holds notes\.txt"):
        trainer.save_pretrained(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def refused(rank: int, group: object) -> str:
    with pytest.raises(ValueError) as error:
        parallelize(adapted("q and v", layers_to_transform=[3]), PLANS["pp 2"][1], optimizer=AdamW)
    return str(error.value)


def test_a_stage_with_nothing_to_train_is_refused(world):
    for said in world(2).run(refused):
        assert said.startswith("stage 0 of the pipeline (blocks 0 to 1) has no parameter")
