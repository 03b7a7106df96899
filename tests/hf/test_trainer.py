"""ZeroTrainer beside the Trainer and DistributedDataParallel: losses, norms, weights, and runs that
go on from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import full
from tests.hf.runs import CLIPPED, finished, gpt2, launched, trainer

pytestmark = pytest.mark.cpu_only
STAGES = (0, 1, 2, 3)


def _trained(
    rank: int, group: Any, folder: str, dtype: torch.dtype, options: dict[str, Any]
) -> list[Any]:
    found = []
    with launched(rank, group):
        for stage in (None, *STAGES):
            run = trainer(
                folder, gpt2(dtype=dtype), None if stage is None else ZeroConfig(stage), **options
            )
            run.train()
            found.append(finished(run))
    return found


def _differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(
        float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max())
        for name in wanted
    )


@pytest.mark.parametrize(
    "accumulated", [full(1, id="each_batch"), pytest.param(2, id="two_batches")]
)
def test_the_trainer_over_zero_is_the_trainer_over_ddp(world, tmp_path, accumulated: int):
    """Clipped, with weight decay and a schedule, in float64: what is left is the order of sums."""
    start = {name: p.detach() for name, p in gpt2().named_parameters()}
    options = {"gradient_accumulation_steps": accumulated}
    for plain, *spread in world(2).run(
        _trained, str(tmp_path), torch.float64, options, timeout=240.0
    ):
        losses, norms, weights = plain
        assert len(losses) == 5 * accumulated
        assert min(norms) > CLIPPED
        assert _differences(start, weights) > 1e-2
        for found in spread:
            assert found[0] == pytest.approx(losses, rel=1e-12)
            assert found[1] == pytest.approx(norms, rel=1e-12)
            assert _differences(found[2], weights) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    [
        full({}, id="fp32"),
        pytest.param({"bf16": True}, id="autocast"),
        full({"activation_checkpointing": True}, id="recomputed"),
    ],
)
def test_without_clipping_the_bits_are_those_of_ddp(world, tmp_path, how: dict[str, Any]):
    """Of two ranks, whose sum has one order; norms are summed otherwise, and clipping multiplies by
    them."""
    for plain, *spread in world(2).run(
        _trained, str(tmp_path), torch.float32, {"max_grad_norm": 0.0, **how}, timeout=240.0
    ):
        for found in spread:
            assert found[0] == plain[0]
            assert all(torch.equal(found[2][name], weight) for name, weight in plain[2].items())


def test_each_train_has_an_optimizer_of_its_model(world, tmp_path):
    """A second train() goes on with the first one's optimizer; a model that model_init makes anew
    has a new one."""
    for again, anew in world(2).run(_twice, str(tmp_path)):
        assert again == (True, True)
        assert anew == (False, True)


def _twice(rank: int, group: Any, folder: str) -> list[tuple[bool, bool]]:
    found = []
    with launched(rank, group):
        for made in (False, True):
            run = trainer(
                folder,
                None if made else gpt2(),
                ZeroConfig(3),
                given={"model_init": lambda: gpt2()} if made else None,
            )
            run.train()
            first = run.zero_optimizer
            run.train()
            found.append((run.zero_optimizer is first, run.zero_optimizer.model is run.model))
            run.zero_optimizer.close()
    return found


def _given(rank: int, group: Any, folder: str, stage: int) -> str:
    model = gpt2()
    with launched(rank, group):
        zero = ZeroOptimizer(model, torch.optim.AdamW, ZeroConfig(stage=stage), lr=1e-3)
        try:
            trainer(folder, model, None, given={"optimizers": (zero, None)}).train()
        except RuntimeError as error:
            return str(error)
        finally:
            zero.close()
    return "nothing"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_trainer_that_is_given_a_zero_optimizer_is_refused_before_its_first_step(
    world, tmp_path, stage: int
):
    """It moves the model, which is a copy from cpu to cpu:0, and wraps it."""
    for said in world(2).run(_given, str(tmp_path), stage):
        assert "with transformers pyops.hf.ZeroTrainer" in said


def _refusals(rank: int, group: Any, folder: str) -> list[str]:
    import transformers

    import pyops

    found = []

    def refused(zero: Any, *, given: Any = None, **options: Any) -> None:
        try:
            trainer(folder, gpt2(), zero, given=given, **options)
            found.append("nothing")
        except ValueError as error:
            found.append(str(error))

    one_bit = (
        pyops.optim.OneBitAdam,
        {"lr": 1e-3, "config": pyops.onebit.OneBitConfig(warmup_steps=2)},
    )
    with launched(rank, group):
        for options in ({}, ZeroConfig(1, max_grad_norm=1.0), ZeroConfig(1, reduction="sum")):
            refused(options)
        model = gpt2()
        refused(
            ZeroConfig(1), given={"optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}
        )
        refused(ZeroConfig(1), auto_find_batch_size=True)
        refused(ZeroConfig(1), bf16_full_eval=True)
        refused(ZeroConfig(1), given={"optimizer_cls_and_kwargs": one_bit})
        refused(ZeroConfig(1), given={"optimizer_cls_and_kwargs": one_bit}, max_grad_norm=0.0)
        refused(ZeroConfig(1), given={"optimizer_cls_and_kwargs": (lambda: None, {})})
    with launched(rank, group):
        args = transformers.Seq2SeqTrainingArguments(
            folder, use_cpu=True, predict_with_generate=True, report_to=[]
        )
        for stage in (2, 3):
            refused(ZeroConfig(stage), given={"args": args})
    with launched(rank, group):
        refused(ZeroConfig(1), torch_compile=True)
    return found


def test_what_cannot_work_is_refused_when_the_trainer_is_made(world, tmp_path):
    expected = [
        "zero is {}; give a pyops.zero.ZeroConfig",
        "zero has max_grad_norm=1.0; leave it out: TrainingArguments(max_grad_norm=...) clips",
        "zero has reduction='sum'",
        "ZeroTrainer makes its ZeroOptimizer when the model is on its device; give the class",
        "TrainingArguments(auto_find_batch_size=True)",
        "TrainingArguments(bf16_full_eval=True)",
        "after its warm-up OneBitAdam",
        "nothing",
        "optim='adamw_torch_fused' is not one optimizer's class",
        "nothing",
        "predict_with_generate=True",
        "TrainingArguments(torch_compile=True)",
    ]
    for said in world(2).run(_refusals, str(tmp_path)):
        assert [line.startswith(start) for line, start in zip(said, expected, strict=True)] == [
            True
        ] * len(expected), said
