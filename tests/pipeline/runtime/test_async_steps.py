"""The stream of an asynchronous schedule: its state, what an error leaves, what each step is the
mean of, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops import checkpoint
from pyops.mesh import ALONE
from pyops.pipeline import Pipeline, PipelineConfig, PipeMareOptions, Schedule, custom, schedule
from tests.pipeline.reference import batch, mlp

pytestmark = pytest.mark.cpu_only

mse = nn.functional.mse_loss


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def made(name: str, k: int, m: int, **options: Any) -> Schedule:
    return schedule(name, num_stages=k, num_microbatches=m, **options)


def weights_of(layers: list[nn.Module]) -> list[Tensor]:
    return [p.detach().clone() for layer in layers for p in layer.parameters()]


@pytest.mark.parametrize(
    ("name", "remedies"),
    [("pipedream", None), ("pipemare", PipeMareOptions(decay=0.1, anneal=9, synchronous=1))],
)
def test_a_saved_run_goes_on_as_if_it_had_not_stopped(
    tmp_path, name: str, remedies: PipeMareOptions | None
):
    x, target = batch(12)

    def fresh(layers: list[nn.Module]) -> Pipeline:
        return Pipeline(
            layers,
            schedule=made(name, 3, 12),
            group=ALONE,
            loss=mse,
            optimizer=adam,
            pipemare=remedies,
        )

    layers = mlp()
    pipeline = fresh(layers)
    for _ in range(2):
        pipeline.step(x, target)
    state = pipeline.async_steps.state_dict()
    parts = [
        {"calls": state["calls"], "stages": {index: stage}}
        for index, stage in state["stages"].items()
    ]  # of three ranks
    checkpoint.save(tmp_path / "saved", {"model": pipeline.state_dict(), "ranks": parts})
    for _ in range(2):
        pipeline.step(x, target)

    loaded, _ = checkpoint.load(tmp_path / "saved")
    again = mlp()
    resumed = fresh(again)
    resumed.load_state_dict(loaded["model"])
    merged = {index: stage for part in loaded["ranks"] for index, stage in part["stages"].items()}
    resumed.async_steps.load_state_dict({"calls": loaded["ranks"][0]["calls"], "stages": merged})
    for _ in range(2):
        resumed.step(x, target)
    assert all(
        torch.equal(a, b) for a, b in zip(weights_of(layers), weights_of(again), strict=True)
    )
    assert all(
        not torch.equal(a, loaded["model"][name]) for name, a in pipeline.state_dict().items()
    )
    with pytest.raises(ValueError, match="stages 1, not 0; put those of all ranks together"):
        resumed.async_steps.load_state_dict(parts[1])
    elsewhere = Pipeline(
        mlp(),
        schedule=made(name, 3, 12),
        group=ALONE,
        loss=mse,
        optimizer=adam,
        config=PipelineConfig(boundaries=[0, 1, 2, 8]),
    )
    with pytest.raises(ValueError, match="make the pipeline with the same boundaries"):
        elsewhere.async_steps.load_state_dict(state)


def test_an_error_within_leaves_the_newest_weights_and_no_gradients():
    x, target = batch(12)
    layers = mlp()
    pipeline = Pipeline(
        layers, schedule=made("pipedream", 3, 12), group=ALONE, loss=mse, optimizer=sgd
    )
    newest: list[Tensor] = []
    meeting: list[Tensor] = []

    def stop(gradient: Tensor) -> None:
        if (
            len(newest) == 6
        ):  # steps; the seventh backward of the first stage meets weights of two steps before
            meeting.append(layers[0][0].weight.detach().clone())
            raise ArithmeticError("no such number")

    layers[0].register_forward_hook(lambda layer, x, y: y.register_hook(stop) and None)
    pipeline.on_action(
        lambda action: (
            newest.append(layers[0][0].weight.clone()) if str(action)[:2] == "0U" else None
        )
    )
    with pytest.raises(ArithmeticError):
        pipeline.step(x, target)
    assert torch.equal(meeting[0], newest[3])
    assert torch.equal(layers[0][0].weight, newest[5])
    assert [stepping.versions.num_kept for stepping in pipeline.async_steps.of_stage.values()] == [
        1
    ] * 3
    newest.extend(newest)  # more than six: nothing stops it
    again = mlp()
    nn.Sequential(*again).load_state_dict(nn.Sequential(*layers).state_dict())
    assert any(p.grad is not None for p in pipeline.parameters())
    pipeline.step(x, target)
    assert all(p.grad is None for p in pipeline.parameters())
    Pipeline(again, schedule=made("pipedream", 3, 12), group=ALONE, loss=mse, optimizer=sgd).step(
        x, target
    )
    assert all(
        torch.equal(a, b) for a, b in zip(weights_of(layers), weights_of(again), strict=True)
    )


def test_evaluation_meets_the_newest_weights_and_frozen_ones_stay():
    x, target = batch(12)
    layers = mlp()
    for layer in layers[:3]:
        layer.requires_grad_(False)
    pipeline = Pipeline(
        layers,
        schedule=made("pipedream", 3, 12),
        group=ALONE,
        loss=mse,
        optimizer=sgd,
        config=PipelineConfig(boundaries=[0, 2, 5, 8]),
    )
    pipeline.step(x, target)
    assert list(pipeline.async_steps.optimizers) == [1, 2]
    moved = [
        not torch.equal(a, b) for a, b in zip(weights_of(layers), weights_of(mlp()), strict=True)
    ]
    assert moved == [False] * 6 + [True] * 10
    with torch.no_grad():
        torch.testing.assert_close(pipeline(x), nn.Sequential(*layers)(x))


def test_each_step_takes_the_mean_of_its_micro_batches():
    """By rows, by `loss_denominator`, or the sum; the loss that is returned is of the whole
    batch."""
    x, target = batch(12)
    kept = (torch.arange(12) % 4 != 1).float()[:, None].expand(12, 8).contiguous()
    masked = {"y": target, "kept": kept}

    def mean_over_kept(y: Tensor, wanted: dict[str, Tensor]) -> Tensor:
        return ((y - wanted["y"]).square() * wanted["kept"]).sum() / wanted["kept"].sum()

    def total(y: Tensor, wanted: Tensor) -> Tensor:
        return (y - wanted).square().sum()

    for loss, wanted, options in (
        (mean_over_kept, masked, {"loss_denominator": lambda part: part["kept"].sum()}),
        (total, target, {"reduction": "sum"}),
    ):
        ours, theirs = mlp(), nn.Sequential(*mlp())
        plan = custom(["0F0 0F1 0F2 0B0 0B1 0B2 0U0 0F3 0B3 0U1"], weights="flush")
        pipeline = Pipeline(
            ours,
            schedule=plan,
            group=ALONE,
            loss=loss,
            optimizer=lambda some: torch.optim.SGD(some, lr=0.01),
            config=PipelineConfig(**options),
        )
        before = float(loss(theirs(x), wanted).detach())
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
        for rows in (slice(0, 9), slice(9, 12)):
            part = (
                wanted[rows]
                if isinstance(wanted, Tensor)
                else {name: each[rows] for name, each in wanted.items()}
            )
            loss(theirs(x[rows]), part).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = float(pipeline.step(x, wanted))
        assert found != before  # the last micro-batch met other weights
        assert abs(found / before - 1) < 0.5
        for a, b in zip(weights_of(ours), weights_of(list(theirs)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_what_does_not_go_together_is_refused():
    stream = made("pipedream", 2, 4)

    def refused(match: str, **options: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=match):
            Pipeline(
                options.pop("layers", None) or mlp(4),
                group=ALONE,
                **{"schedule": stream, "loss": mse, "optimizer": sgd} | options,
            )

    refused("'pipedream' takes its steps .* needs an optimizer", optimizer=None)
    refused(
        "optimizer is given, but the schedule '1f1b' takes no steps", schedule=made("1f1b", 2, 4)
    )
    refused(
        "pipemare is given, but the schedule 'gpipe'",
        schedule=made("gpipe", 2, 4),
        optimizer=None,
        pipemare=PipeMareOptions(),
    )
    refused("decay is 0.1, but .*'pipedream'", pipemare=PipeMareOptions(decay=0.1))
    refused("made a list for stage 0", optimizer=list)
    refused(
        r"optimizer of stage 0 lacks 0.0.bias", optimizer=lambda some: torch.optim.SGD(some[:1])
    )
    alien = nn.Parameter(torch.ones(1))
    refused(
        "1 parameters that are not the stage's",
        optimizer=lambda some: torch.optim.SGD([*some, alien]),
    )
    shared = mlp(4)
    shared[0][0].bias = nn.Parameter(shared[0][0].weight.detach()[0])
    refused(r"parameters 0.0.weight and 0.0.bias share memory", layers=shared)
    tied = mlp(4)
    tied[3][0].weight = tied[0][0].weight
    refused(r"0.0.weight and 3.0.weight are one parameter on several stages", layers=tied)
    unlike = custom(["0F0 0F1 0B0 0U0 0B1 0U1", "1F0 1B0 1F1 1B1 1U0"], weights="stash")
    refused(r"step 0 is of micro-batches \[0\] on stage 0, of \[0, 1\] on stage 1", schedule=unlike)
    refused(
        "no step after its backward of 1; end its order with 0U1",
        schedule=custom(["0F0 0B0 0U0 0F1 0B1"], weights="stash"),
    )
    with pytest.raises(ValueError, match=r"scale is 0\.5"):
        Pipeline(mlp(4), schedule=stream, group=ALONE, loss=mse, optimizer=sgd).step(
            *batch(4), scale=0.5
        )
    for options in (
        {"anneal": -1},
        {"anneal": 0.5},
        {"decay": 1.0},
        {"decay": 0.0},
        {"synchronous": -1},
        {"synchronous": math.nan},
    ):
        refused(
            f"{next(iter(options))} is ",
            schedule=made("pipemare", 2, 4),
            pipemare=PipeMareOptions(**options),
        )


def one_bad_option(rank: int, group: Any) -> str:
    with pytest.raises(ValueError, match="decay is") as error:
        Pipeline(
            mlp(),
            schedule=made("pipemare", 2, 6),
            group=group,
            loss=mse,
            optimizer=sgd,
            pipemare=PipeMareOptions(decay=2.0 if rank else 0.5),
        )
    return str(error.value)


def test_an_option_that_is_bad_on_one_rank_is_refused_on_all(world):
    assert all("decay is 2.0" in text for text in world(2).run(one_bad_option))


def wrong_ranks(rank: int, group: Any) -> list[str]:
    plan, (x, target), messages = made("pipedream", 2, 6), batch(12), []
    try:
        Pipeline(mlp(), schedule=plan, group=group, loss=mse, optimizer=sgd if rank else None)
    except ValueError as error:
        messages.append(str(error))

    pipeline = Pipeline(mlp(), schedule=plan, group=group, loss=mse, optimizer=sgd)
    calls: list[int] = []

    def stop(layer: nn.Module, args: Any) -> None:
        calls.append(1)
        if rank and len(calls) == 4:
            raise ArithmeticError("no such number")

    next(iter(pipeline.stages.values())).layers[0].register_forward_pre_hook(stop)
    try:
        pipeline.step(x, target)
    except (ArithmeticError, RuntimeError) as error:
        messages.append(f"{error} after {len(calls)}")
    weights = weights_of(list(pipeline.children()))
    messages.append(
        str([each.versions.num_kept for each in pipeline.async_steps.of_stage.values()])
    )
    pipeline.step(x, target)
    moved = all(
        not torch.equal(a, b)
        for a, b in zip(weights, weights_of(list(pipeline.children())), strict=True)
    )
    messages.append(f"moved {moved}")
    return messages


def test_what_one_rank_refuses_or_fails_in_all_do(world):
    first, second = world(2).run(wrong_ranks)
    assert "give optimizer=" in first[0]
    assert first[0] == second[0]
    assert "no such number" in first[1]
    assert "1F3" in first[1]
    assert "no such number after 4" in second[1]
    assert first[2:] == second[2:] == ["[1]", "moved True"]
