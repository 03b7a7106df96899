"""[zero] and [recompute] change where things lie, and neither a loss nor a checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import Config, ConfigError, OptimizerConfig, PrecisionConfig, ZeroConfig
from pyops.models import GPT
from pyops.precision import LossScale
from pyops.train import TextTraining, train
from pyops.train.report.metrics import read_rows
from pyops.train.setup.planned import Planned
from tests.grids import cut, full
from tests.train.test_resume import train_and_stop_rank_1
from tests.train.tiny_run import STEPS, config_of, losses, norms, same, train_on_rank

pytestmark = pytest.mark.cpu_only

STAGES = (1, 2, 3)


def final_model(config: Config) -> dict[str, torch.Tensor]:
    return load(config.folder / "checkpoints" / f"step-{STEPS:08}")[0]["model"]


# Stage 1 holds back the least; the suite has it on one rank, and where a run goes on, below. At
# stage 3 ranks share out all that they do at the others.
@pytest.mark.parametrize(
    ("stage", "precision"),
    cut(itertools.product(STAGES, ["fp32", "bf16"]), keep=[(3, "bf16")]),
)
def test_the_stage_does_not_change_the_losses(world, tmp_path, stage, precision, reference):
    given: dict[str, Any] = {"precision": precision, "dropout": 0.1, "micro_batch": 2}
    plain = config_of(tmp_path, "cpu", name="plain", **given)
    config = config_of(tmp_path, "cpu", name="zero", stage=stage, **given)
    plain = reference(plain, ranks=2)
    outcomes = world(2).run(train_on_rank, config)
    assert outcomes[0].steps == STEPS
    assert same(losses(config), losses(plain), within=1e-5 if precision == "fp32" else 2e-2)
    assert same(norms(config), norms(plain), within=1e-4 if precision == "fp32" else 5e-2)
    assert losses(plain)[-1] < losses(plain)[0] - 0.8
    assert (config.folder / "sample.txt").read_text()


@pytest.mark.parametrize("stage", [1, full(2), 3])
def test_alone_too(tmp_path, device, stage, reference):
    plain, config = (
        config_of(tmp_path, device, name="plain"),
        config_of(tmp_path, device, name="zero", stage=stage),
    )
    plain = reference(plain)
    train(config)
    assert same(losses(config), losses(plain))


# Below, stage 3 resumes in fp16, with the state of its loss scale besides.
@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_run_resumes_bit_for_bit(world, tmp_path, stage, reference):
    straight = config_of(tmp_path, "cpu", name="straight", stage=stage)
    broken = dataclasses.replace(straight, name="broken")
    straight = reference(straight, ranks=2)
    first, _ = world(2).run(train_and_stop_rank_1, broken)
    assert 7 < first.steps < STEPS
    world(2).run(train_on_rank, broken, True)
    assert losses(broken) == losses(straight)
    ours, theirs = final_model(broken), final_model(straight)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


# tests/zero/test_offload.py has the bits, with a checkpoint, and the last but one what runs.
@pytest.mark.full
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_states_elsewhere_give_the_same_bits_and_resume(world, tmp_path, where, reference):
    straight = config_of(tmp_path, "cpu", name="straight", stage=2)
    folder = tmp_path / "states"
    folder.mkdir()
    zero = ZeroConfig(2, offload="cpu" if where == "cpu" else str(folder))
    broken = dataclasses.replace(straight, name="broken", zero=zero)
    straight = reference(straight, ranks=2)
    world(2).run(train_and_stop_rank_1, broken)
    world(2).run(train_on_rank, broken, True)
    assert losses(broken) == losses(straight)
    assert not list(folder.iterdir()), "files stay"


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [full(0, 3, 2), full(3, 0, 2), (2, 1, 3), full(1, 3, 1), full(3, 2, 1)],
)
def test_another_stage_and_number_of_ranks_go_on(world, tmp_path, before, after, ranks, reference):
    straight = config_of(tmp_path, "cpu", name="straight", batch=6)
    broken = dataclasses.replace(straight, name="broken", zero=ZeroConfig(before))
    straight = reference(straight, ranks=2)
    world(2).run(train_and_stop_rank_1, broken)
    world(ranks).run(train_on_rank, dataclasses.replace(broken, zero=ZeroConfig(after)), True)
    assert same(losses(broken), losses(straight))


@pytest.mark.full  # tests/zero/layout/test_units.py has the bits, and the last but one what runs
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_recomputed_blocks_give_the_same_bits(world, tmp_path, stage, reference):
    plain = config_of(tmp_path, "cpu", name="plain", dropout=0.1, stage=stage)
    config = config_of(
        tmp_path, "cpu", name="again", dropout=0.1, stage=stage, recompute=("blocks.*",)
    )
    plain = reference(plain, ranks=2)
    world(2).run(train_on_rank, config)
    assert losses(config) == losses(plain)


@pytest.mark.parametrize("stage", [full(0), full(2), 3])
def test_fp16_with_a_loss_scale(world, tmp_path, stage, reference):
    """The scale begins where gradients overflow, comes down, and the run then goes as in fp32."""
    plain = config_of(tmp_path, "cpu", name="plain", num_steps=30)
    options = {"initial_scale": 2.0**20, "hysteresis": 1, "scale_window": 9}
    config = config_of(tmp_path, "cpu", name="half", stage=stage, num_steps=30)
    config = dataclasses.replace(config, precision=PrecisionConfig("fp16", **options))
    plain = reference(plain, ranks=2)
    world(2).run(train_on_rank, config)
    rows = read_rows(config.folder / "metrics.jsonl")
    scale = LossScale(initial=2.0**20, hysteresis=1, window=9)
    for row in rows:
        scale.update(row["grad_norm"] is None)
        assert row["loss_scale"] == scale.scale
    assert 2 <= rows[-1]["skipped"] <= 8
    assert rows[-1]["skipped"] == sum(row["grad_norm"] is None for row in rows)
    first = next(row for row in rows if row["grad_norm"] is not None)
    assert 0.3 < first["grad_norm"] / norms(plain)[0] < 3, "the norm is unscaled"
    assert losses(config)[-1] < losses(config)[0] - 0.8


@pytest.mark.parametrize("stage", [full(0), 3])
def test_an_fp16_run_resumes_bit_for_bit(world, tmp_path, stage, reference):
    straight = config_of(tmp_path, "cpu", name="straight", stage=stage)
    straight = dataclasses.replace(
        straight,
        precision=PrecisionConfig("fp16", initial_scale=2.0**24, hysteresis=1, scale_window=4),
    )
    broken = dataclasses.replace(straight, name="broken")
    straight = reference(straight, ranks=2)
    world(2).run(train_and_stop_rank_1, broken)
    world(2).run(train_on_rank, broken, True)
    assert losses(broken) == losses(straight)
    whole, again = (read_rows(config.folder / "metrics.jsonl") for config in (straight, broken))
    assert [row["loss_scale"] for row in whole] == [row["loss_scale"] for row in again]


def test_the_memory_of_a_rank_is_said(world, tmp_path, capfd):
    config = config_of(tmp_path, "cpu", stage=0)
    train(config)
    numel = sum(p.numel() for p in GPT(config.model).parameters())
    found = re.search(
        r"memory per rank: parameters ([\d.]+) kB, gradients ([\d.]+) kB, states ([\d.]+) kB",
        capfd.readouterr().out,
    )
    assert found
    parameters, gradients, states = (1000 * float(text) for text in found.groups())
    assert parameters == pytest.approx(4 * numel, rel=0.1)
    assert gradients == pytest.approx(4 * numel, rel=0.1)
    assert states == pytest.approx(8 * numel, rel=0.1)


def kept_on_rank(
    rank: int, group: object, config: Config
) -> tuple[dict[str, int], list[str], bool]:
    """After a step: the bytes that this rank keeps, the modules that are recomputed, whether states
    are elsewhere."""
    run = TextTraining(config, device=torch.device("cpu"))
    run.train_step()
    recomputed = [name for name, module in run.model.named_modules() if "forward" in vars(module)]
    elsewhere = isinstance(run.strategy, Planned) and run.strategy.zero.owned.offloaded is not None
    return run.strategy.memory(), recomputed, elsewhere


def first_values(
    rank: int, group: object, config: Config
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    run = TextTraining(config, device=torch.device("cpu"))
    table = next(buffer for name, buffer in run.model.named_buffers() if "table" in name)
    with run.strategy.whole():
        return {name: p.detach().clone() for name, p in run.model.named_parameters()}, table.clone()


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_made_part_by_part_begins_with_the_same_bits(world, tmp_path, stage):
    plain = config_of(tmp_path, "cpu", name="plain", precision="bf16")
    plain = dataclasses.replace(plain, model=dataclasses.replace(plain.model, positions="rotary"))
    config = dataclasses.replace(plain, name="zero", zero=ZeroConfig(stage))
    (values, table), _ = world(2).run(first_values, plain)
    for found, turned in world(2).run(first_values, config):
        assert found.keys() == values.keys()
        assert torch.equal(turned, table)
        for name, value in values.items():
            assert torch.equal(found[name], value), name
    assert min(float(value.float().std()) for value in values.values() if value.dim() > 1) > 0.005


def test_what_is_asked_for_is_what_runs(world, tmp_path):
    """Losses are the same whether or not a stage, recomputation or offload takes place; these are
    not."""
    shares = {0: (1.0, 1.0, 1.0), 1: (1.0, 1.0, 0.5), 2: (1.0, 0.5, 0.5), 3: (0.5, 0.5, 0.5)}
    whole = world(2).run(kept_on_rank, config_of(tmp_path, "cpu", name="0"))[0][0]
    for stage, want in shares.items():
        kept = world(2).run(
            kept_on_rank, config_of(tmp_path, "cpu", name=f"s{stage}", stage=stage)
        )[0][0]
        found = tuple(kept[kind] / whole[kind] for kind in ("parameters", "gradients", "states"))
        assert found == pytest.approx(want, abs=0.08), stage
    config = config_of(
        tmp_path, "cpu", name="all", stage=2, recompute=("blocks.*",), offload=str(tmp_path)
    )
    _, recomputed, elsewhere = world(2).run(kept_on_rank, config)[0]
    assert recomputed == ["blocks.0", "blocks.1"]
    assert elsewhere


def test_what_does_not_go_together_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"stage is 1, but optimizer.name 'onebit_adam'.* set zero\.stage to 0"
    ):
        Config(optimizer=OptimizerConfig(name="onebit_adam"), zero=ZeroConfig(1))
    with pytest.raises(
        ValueError, match=r"zero.stage is 2, which does not take communication.codec 'int8'"
    ):
        config_of(tmp_path, "cpu", codec="int8", stage=2)
    with pytest.raises(ValueError, match=r"zero.offload is 'cpu', but zero.stage is 0"):
        Config(zero=ZeroConfig(0, offload="cpu"))
    with pytest.raises(
        ValueError, match=r"zero.offload is 'gpu'; it must be 'none', 'cpu' or a folder"
    ):
        Config(zero=ZeroConfig(1, offload="gpu"))
    with pytest.raises(ValueError, match=r"zero.stage is 4; it must be 0, 1, 2 or 3"):
        Config(zero=ZeroConfig(4))
    with pytest.raises(
        ConfigError, match=r"recompute.modules: no module of the model is 'block.*'"
    ):
        train(config_of(tmp_path, "cpu", recompute=("block.*",)))
