"""Checkpoints of ZeroTrainer: runs that go on have the bits of one that never stopped; transformers
reads the folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.zero import ZeroConfig
from tests.grids import full
from tests.hf.runs import finished, gpt2, launched, trainer

pytestmark = pytest.mark.cpu_only


def _stopped(
    rank: int, group: Any, folder: str, zero: dict[str, Any], later: dict[str, Any]
) -> list[Any]:
    """A run of five steps that saves after the second; one that goes on from there; one that loads
    the weights alone."""
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    found = []
    with launched(rank, group):
        run = trainer(f"{folder}/whole", gpt2(), zero, **options)
        run.train()
        found.append(finished(run))
        run = trainer(f"{folder}/again", gpt2(), later, **options)
        run.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-2")
        found.append(finished(run))
        run = trainer(f"{folder}/forgets", gpt2(), later, **options)
        run._load_optimizer_and_scheduler = lambda _: None
        run.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-2")
        found.append(finished(run))
    return found


BF16 = ZeroConfig(2, precision="bf16")


@pytest.mark.parametrize(
    ("zero", "later"),
    [
        full(ZeroConfig(1), ZeroConfig(1)),
        full(ZeroConfig(3), ZeroConfig(3)),
        full(BF16, BF16),
        (ZeroConfig(3), ZeroConfig(2)),
    ],
    ids=["stage_1", "stage_3", "stage_2_bf16", "stage_3_to_2"],
)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(world, tmp_path, zero, later):
    for whole, again, forgets in world(2).run(_stopped, str(tmp_path), zero, later, timeout=240.0):
        assert again[0] == whole[0][4:]
        assert again[1] == whole[1]  # with those of the steps before, from the checkpoint
        assert all(torch.equal(again[2][name], weight) for name, weight in whole[2].items())
        assert forgets[0] != whole[0][4:]


def _best(rank: int, group: Any, folder: str, stage: int) -> list[Any]:
    """(loss before, those after each step, that of the best that came back, its folder, weights);
    the rate is too high."""
    with launched(rank, group):
        run = trainer(
            folder,
            gpt2(),
            ZeroConfig(stage),
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=1,
            save_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            learning_rate=0.5,
            warmup_steps=0,
            max_steps=3,
        )
        before = run.evaluate()["eval_loss"]
        run.train()
        found = [logs["eval_loss"] for logs in run.state.log_history if "eval_loss" in logs]
        last = run.evaluate()["eval_loss"]
        best = str(run.state.best_model_checkpoint)
        run.save_model(f"{folder}/saved")
        *_, weights = finished(run)
    return [before, found, last, best, weights]


@pytest.mark.full
@pytest.mark.parametrize("stage", [full(1), 3])
def test_the_best_model_comes_back(world, tmp_path, stage: int):
    from transformers import GPT2LMHeadModel

    for before, found, last, best, weights in world(2).run(
        _best, str(tmp_path), stage, timeout=240.0
    ):
        assert last == min(found)
        assert Path(best).name == f"checkpoint-{found.index(last) + 1}" != "checkpoint-3"
        assert before not in found
        loaded = dict(GPT2LMHeadModel.from_pretrained(f"{tmp_path}/saved").named_parameters())
        assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
        from_best = dict(GPT2LMHeadModel.from_pretrained(best).named_parameters())
        assert all(torch.equal(from_best[name], weight) for name, weight in weights.items())


def _adapted(rank: int, group: Any, folder: str) -> list[Any]:
    """LoRA by the Trainer and at each stage; at stage 3 it goes on from a checkpoint, too."""
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        model = gpt2(dtype=torch.float64)
        torch.manual_seed(1)
        made = get_peft_model(
            model,
            LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
        )
        return made.double()

    found = []
    with launched(rank, group):
        for stage in (None, 1, 2, 3):
            saves = {"save_strategy": "steps", "save_steps": 2} if stage == 3 else {}
            run = trainer(folder, adapted(), None if stage is None else ZeroConfig(stage), **saves)
            run.train()
            found.append(finished(run))
        run = trainer(folder, adapted(), ZeroConfig(3))
        run.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        found.append(finished(run))
    return found


@pytest.mark.full
def test_peft_by_the_trainer_is_ddp(world, tmp_path):
    pytest.importorskip("peft")
    for plain, *spread, again in world(2).run(_adapted, str(tmp_path), timeout=240.0):
        for found in spread:
            assert found[0] == pytest.approx(plain[0], rel=1e-12)
            for name, weight in plain[2].items():
                assert (found[2][name] - weight).abs().max() <= 1e-12 * weight.abs().max()
        assert again[0] == spread[-1][0][2:]
        assert all(torch.equal(again[2][name], weight) for name, weight in spread[-1][2].items())
        assert plain[0][0] != plain[0][-1]
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").exists()
