"""pyops.hf.Trainer on a plan beside transformers' Trainer on one process: losses, gradients,
evaluation, the folders that are written and runs that go on from them."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch

from pyops.parallel import ParallelPlan
from pyops.precision import LossScale
from pyops.zero import ZeroConfig
from tests.grids import cut, full
from tests.hf.runs import alone, finished, gpt2, launched, rows, trainer

pytestmark = pytest.mark.cpu_only

PLANS = {
    "dp 2, zero 1": (2, ParallelPlan(zero=ZeroConfig(stage=1))),
    "dp 2, recompute": (2, ParallelPlan(recompute=("transformer.h.*",))),
    "tp 2": (2, ParallelPlan(tp=2)),
    "tp 2 x dp 2, zero 1": (4, ParallelPlan(tp=2, zero=ZeroConfig(stage=1))),
    "tp 2 x dp 2, zero 3": (4, ParallelPlan(tp=2, zero=ZeroConfig(stage=3))),
}
# Weights are linear in the gradients of such a step.
SGD = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9})}
GLOBAL_ROWS = 8  # of a step, in two micro-batches


def _run(
    folder: str, plan: ParallelPlan | None, copies: int, own: Any = SGD, **options: Any
) -> Any:
    given = {**own, "compute_loss_func": None, "eval_dataset": rows(8)}
    args: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    args["per_device_eval_batch_size"] = 4 // copies
    args["per_device_train_batch_size"] = GLOBAL_ROWS // 2 // copies
    return trainer(folder, gpt2(), plan, given=given, **(args | options))


def _measured(run: Any) -> tuple[list[float], list[float], float, torch.Tensor]:
    """(logged losses, norms, evaluated loss, logits of five rows) of a run that trained."""
    logs = run.state.log_history
    losses = [each["loss"] for each in logs if "loss" in each]
    norms = [float(each["grad_norm"]) for each in logs if "grad_norm" in each]
    logits = torch.from_numpy(run.predict(rows(5)).predictions)
    return losses, norms, run.evaluate()["eval_loss"], logits


@cache
def plain() -> tuple[Any, dict[str, torch.Tensor]]:
    """transformers' Trainer on this rank alone."""
    with alone():
        run = _run("unused", None, 1)
        assert run.accelerator.num_processes == 1
        run.train()
        measured = _measured(run)
        *_, weights = finished(run)
    start = dict(gpt2().named_parameters())
    assert max(float((w - start[name].detach()).abs().max()) for name, w in weights.items()) > 0.05
    assert min(measured[1]) > 0.5, "nothing is clipped"
    return measured, weights


def _trained(rank: int, group: Any, folder: str, plan: ParallelPlan) -> Any:
    expected = plain()
    with launched(rank, group):
        run = _run(folder, plan, group.size() // plan.tp)
        run.train()
        measured = _measured(run)
        run.save_model(f"{folder}/saved")
        finished(run)
    return measured, expected


IN_SUITE = [("dp 2, zero 1",), ("tp 2",)]


@pytest.mark.parametrize("name", cut([(each,) for each in PLANS], keep=IN_SUITE))
def test_a_trainer_on_a_plan_is_the_trainer_on_one_process(world, tmp_path, name: str):
    from transformers import GPT2LMHeadModel

    ranks, plan = PLANS[name]
    for found, expected in world(ranks).run(_trained, str(tmp_path), plan, timeout=240.0):
        (losses, norms, evaluated, logits), weights = expected
        assert found[0] == pytest.approx(losses, abs=1e-5)
        assert found[1] == pytest.approx(norms, rel=1e-4)
        assert found[2] == pytest.approx(evaluated, abs=1e-5)
        torch.testing.assert_close(found[3], logits, rtol=0, atol=1e-4)  # five rows, in order
    loaded = dict(GPT2LMHeadModel.from_pretrained(tmp_path / "saved").named_parameters())
    for key, weight in weights.items():
        torch.testing.assert_close(loaded[key].detach(), weight, rtol=0, atol=1e-5)


def _stopped(rank: int, group: Any, folder: str, plan: ParallelPlan) -> list[list[float]]:
    """The losses of a run that saves after its second step, and of one that goes on from there."""
    found = []
    with launched(rank, group):
        for name, resumed in (("whole", None), ("again", f"{folder}/whole/checkpoint-2")):
            own = {"save_strategy": "steps", "save_steps": 2}
            run = _run(f"{folder}/{name}", plan, group.size() // plan.tp, **own)
            run.train(resume_from_checkpoint=resumed)
            found.append(run.losses)
            run.zero_optimizer.close()
    return found


@pytest.mark.full
def test_a_run_with_layers_that_are_cut_goes_on_from_its_checkpoint(world, tmp_path):
    plan = ParallelPlan(tp=2, precision="bf16")
    for whole, again in world(2).run(_stopped, str(tmp_path), plan, timeout=240.0):
        assert again == whole[4:]


ADAM = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.05})}
LAYOUTS = {"tp 2": ParallelPlan(tp=2), "dp 2": ParallelPlan(zero=ZeroConfig(stage=1))}


def _handed_on(rank: int, group: Any, folder: str, first: str, then: str) -> Any:
    """The losses of a run of one plan, and of one of another that goes on from its second step."""
    found = []
    with launched(rank, group):
        for plan, resumed in ((first, None), (then, f"{folder}/{first}/checkpoint-2")):
            given = {"save_strategy": "steps", "save_steps": 2}
            copies = group.size() // LAYOUTS[plan].tp
            run = _run(f"{folder}/{plan}", LAYOUTS[plan], copies, own=ADAM, **given)
            run.train(resume_from_checkpoint=resumed)
            logs = [each["loss"] for each in run.state.log_history if "loss" in each]
            found.append(logs)
            run.zero_optimizer.close()
    return found


@pytest.mark.parametrize(("first", "then"), [full("tp 2", "dp 2"), ("dp 2", "tp 2")])
def test_states_of_packed_weights_go_on_at_another_tp(world, tmp_path, first: str, then: str):
    """GPT-2's matrices are transposed where layers are cut, and square ones look alike in both."""
    for whole, again in world(2).run(_handed_on, str(tmp_path), first, then, timeout=240.0):
        assert len(whole) == 5
        assert again[2:] == pytest.approx(whole[2:], abs=1e-5)
        assert abs(whole[4] - whole[2]) > 1e-2, "nothing is learnt"


def _scaled(rank: int, group: Any, folder: str, initial: float) -> Any:
    """Losses, norms, skipped steps and steps of the schedule of a run in fp16."""
    scale = LossScale(initial=initial, hysteresis=1)
    plan = ParallelPlan(tp=2, precision="fp16", zero=ZeroConfig(loss_scale=scale))
    with launched(rank, group):
        run = _run(folder, plan, 1, per_device_eval_batch_size=2)
        run.train()
        losses, norms, evaluated, _ = _measured(run)
        assert {p.dtype for p in run.model.parameters()} == {torch.float16}
        schedule = run.lr_scheduler.state_dict()["last_epoch"]
        run.zero_optimizer.close()
    return losses, norms, evaluated, scale.skipped, schedule


@pytest.mark.full  # steps that overflow stand in the suite
def test_fp16_has_a_loss_scale(world, tmp_path):
    (found, other), (large, _) = (
        world(2).run(_scaled, str(tmp_path), initial, timeout=240.0) for initial in (1.0, 256.0)
    )
    losses, norms, evaluated, skipped, schedule = found
    assert (losses, norms, evaluated) == other[:3], "the ranks differ"
    (expected, expected_norms, expected_loss, _), _ = plain()
    assert losses == pytest.approx(expected, abs=0.02)
    assert evaluated == pytest.approx(expected_loss, abs=0.02)
    assert norms == pytest.approx(expected_norms, rel=0.05)
    assert (skipped, schedule) == (0, 5)
    assert large[0] == pytest.approx(losses, abs=2e-3), "a power of two changes nothing"
    assert large[1] == pytest.approx(norms, rel=2e-2)


def test_fp16_skips_steps_that_overflow(world, tmp_path):
    for losses, norms, _, skipped, schedule in world(2).run(_scaled, str(tmp_path), 2.0**21):
        assert skipped > 0
        assert schedule == 5 - skipped, "the schedule went on in a step that was skipped"
        assert not math.isfinite(norms[0])
        assert math.isfinite(norms[-1])
        assert all(map(math.isfinite, losses))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (ParallelPlan(pp=2), "plan has pp=2, and the Trainer's loop calls the whole model"),
        (ParallelPlan(max_grad_norm=1.0), "TrainingArguments(max_grad_norm=...) clips"),
        (ParallelPlan(num_microbatches=2), "gradient_accumulation_steps"),
        (ParallelPlan(cp=2), "parallelize"),
        (ParallelPlan(tp=0), "tp is 0"),
        (ParallelPlan(tp=2), "the plan is for tp 2 x pp 1 = 2 ranks"),
        ("tp 2", "give pyops.parallel.ParallelPlan"),
    ],
)
def test_a_plan_that_the_trainer_cannot_follow_is_refused(tmp_path, plan, said: str):
    import pyops.hf

    with alone(), pytest.raises((ValueError, TypeError)) as error:
        import transformers

        args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        pyops.hf.Trainer(model=gpt2(), args=args, plan=plan)
    assert said in str(error.value)


def test_without_a_plan_one_process_is_the_trainer():
    """To what clipping leaves: norms are summed in another order."""
    (losses, norms, *_), weights = plain()
    with alone():
        run = _run("unused", ParallelPlan(), 1)
        run.train()
        found = _measured(run)
        *_, ours = finished(run)
    assert found[0] == pytest.approx(losses, abs=1e-6)
    assert found[1] == pytest.approx(norms, rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-6)
