"""What goes wrong on one rank of an elastic run, while others take part in the same, is raised on
all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyops.checkpoint import load, save
from pyops.elastic import Bound, Elastic
from pyops.elastic.layout.padded_batch import PaddedBatch
from tests.elastic import networks
from tests.elastic.flat import make_elastic
from tests.elastic.runtime.test_bad_runs import BATCH, BLOCKS, make
from tests.grids import full

pytestmark = pytest.mark.cpu_only


def told(call: Any) -> str:
    with pytest.raises((ValueError, LookupError, RuntimeError, ArithmeticError)) as error:
        call()
    return str(error.value)


def rows_failing_on(where: int | None, rank: int) -> Any:
    def rows(share: PaddedBatch) -> Any:
        if rank == where:
            raise LookupError("no such row")
        return *networks.rows(share.samples), {}

    return rows


def in_a_step(rank: int, group: Any) -> tuple[str, list[float]]:
    """What each rank is told of a label that replica 1 alone has; losses of the steps that
    follow."""
    elastic = make(stages=2)
    shares = elastic.shares()
    share = next(shares)
    x, y = networks.rows(share.samples)
    text = told(lambda: elastic.step(x, y + 99 * (rank >= 2), share=share, lr=0.1))
    losses = [
        elastic.step(*networks.rows(share.samples), share=share, lr=0.1).loss for share in shares
    ]
    elastic.close()
    return text, losses


def test_what_goes_wrong_in_a_step_of_one_replica_is_told_to_all(world):
    found = world(4).run(in_a_step)
    for text, losses in found:
        assert "is out of bounds" in text
        assert losses == found[0][1]
        assert len(losses) == 3


def without_optimizer(rank: int, group: Any) -> str:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        if rank == 1:
            raise ValueError("optimizer got an empty parameter list")
        return networks.optimizer(named)

    return told(
        lambda: make_elastic(
            networks.layers(BLOCKS),
            optimizer=optimizer,
            loss=networks.loss,
            samples=networks.SAMPLES,
            batch=BATCH,
            seed=5,
            stages=2,
        )
    )


def test_an_optimizer_that_one_rank_can_not_make(world):
    assert world(4).run(without_optimizer) == ["optimizer got an empty parameter list"] * 4


BAD = {"every": -1, "alpha": 2.0, "batch_policy": "each", "lr_rule": "cube", "freeze": "all"}


def bad_options(rank: int, group: Any) -> list[str]:
    return [told(lambda k=k, v=v: make(**({k: v} if rank else {}))) for k, v in BAD.items()]


def test_an_option_that_is_bad_on_one_rank_is_refused_on_all(world):
    for texts in world(2).run(bad_options):
        for text, (name, value) in zip(texts, BAD.items(), strict=True):
            assert f"{name} is {value!r}" in text


def in_a_trial(rank: int, group: Any) -> str:
    return told(lambda: make(stages=2, trial=True, rows_of=rows_failing_on(1, rank)))


def test_rows_of_a_trial_that_one_rank_has_not(world):
    assert world(4).run(in_a_trial) == ["no such row"] * 4


def in_an_evaluation(rank: int, group: Any) -> tuple[list[str], float, bool]:
    """Rows fail on a first stage, a score on a last one; then neither."""

    def score(output: Any, target: Any) -> Any:
        if rank == 3:
            raise LookupError("no such score")
        return networks.right(output, target)

    elastic = make(stages=2)
    texts = [
        told(lambda: elastic.evaluate(13, rows_failing_on(2, rank), score=networks.right)),
        told(lambda: elastic.evaluate(13, rows_failing_on(None, rank), score=score)),
    ]
    found = elastic.evaluate(13, rows_failing_on(None, rank), score=networks.right)
    training = elastic._runtime.worker is not None and elastic._runtime.worker.pipeline.training
    elastic.close()
    return texts, found, training


def test_what_goes_wrong_in_an_evaluation_on_one_rank_is_told_to_all(world):
    found = world(4).run(in_an_evaluation)
    for texts, right, training in found:
        assert texts == ["no such row", "no such score"]
        assert right == found[0][1]
        assert training


NEXT = ("step", "decide", "state_dict", "evaluate", "any_of")  # which may come next


def failing(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    def step(*args: Any, **named: Any) -> None:
        raise ArithmeticError("no such root")

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def called(elastic: Elastic, name: str, shares: Any, rank: int) -> None:
    if name == "step":
        for share in shares:
            elastic.step(*networks.rows(share.samples), share=share, lr=0.1)
    elif name == "evaluate":
        elastic.evaluate(13, rows_failing_on(None, rank), score=networks.right)
    elif name == "any_of":
        elastic.any_of(False)
    else:
        getattr(elastic, name)()


def in_an_optimizer(rank: int, group: Any, folder: str, names: tuple[str, ...]) -> list[Any]:
    """What each rank is told next after rank 1's optimizer failed in a step, twice; and losses
    after going back."""
    found: list[Any] = []
    for number, name in enumerate(names):
        elastic = make(stages=2, policy=Bound(1 / 3))
        saved = f"{folder}/{number}"
        save(saved, elastic.state_dict())
        if rank == 1:
            failing(elastic._runtime.worker.optimizer)
        shares = elastic.shares()
        share = next(shares)
        elastic.step(
            *networks.rows(share.samples), share=share, lr=0.1
        )  # not known yet that one has not taken it
        for _ in range(2):
            with pytest.raises(
                (ArithmeticError, RuntimeError)
            ) as error:  # a pipeline tells its ranks where, too
                called(elastic, name, shares, rank)
            found.append(str(error.value).removeprefix("rank 1 of the pipeline failed in 1F0: "))
            shares = elastic.shares()
        elastic.load_state_dict(load(saved)[0])
        found.append(
            [
                elastic.step(*networks.rows(s.samples), share=s, lr=0.1).loss
                for s in elastic.shares()
            ]
        )
        elastic.close()
    return found


# In a pipeline's step, and in a call of all ranks.
@pytest.mark.parametrize("names", [("step", "decide"), full(NEXT)], ids=str)
def test_what_goes_wrong_in_one_optimizer_is_told_to_all_at_the_next_call(world, tmp_path, names):
    found = world(4).run(in_an_optimizer, str(tmp_path), names)
    for told in found:
        assert told[0::3] == told[1::3] == ["no such root"] * len(names)
        assert told[2::3] == [found[0][2]] * len(names)
        assert len(told[2]) == 4


def with_idle_ranks(rank: int, group: Any, stages: int, then: str) -> list[str]:
    """What each rank hears where two of four are idle, and rank 0's optimizer, or rank 1's, failed
    in the last step."""
    elastic = make_elastic(
        networks.layers(6),
        optimizer=networks.optimizer,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=8,
        seed=5,
        stages=4,
        policy=Bound(1 / 3),
        replicate=False,
    )
    while elastic.layout.stages != stages:
        called(elastic, "step", elastic.shares(), rank)
        elastic.decide()
    shares = list(elastic.shares())
    for share in shares[:-1]:
        elastic.step(*networks.rows(share.samples), share=share, lr=0.1)
    if rank == stages - 1:
        failing(elastic._runtime.worker.optimizer)
    for share in shares[-1:]:
        elastic.step(*networks.rows(share.samples), share=share, lr=0.1)
    found = told(
        elastic.decide
        if rank >= stages or then == "decide"
        else lambda: elastic.load_state_dict({})
    )
    elastic.close()
    return found


@pytest.mark.parametrize("stages", [1, full(2)])
def test_idle_ranks_hear_of_what_went_wrong_in_an_optimizer(world, stages):
    assert world(4).run(with_idle_ranks, stages, "decide") == ["no such root"] * 4


def test_ranks_that_call_one_thing_while_idle_ones_wait_for_another(world):
    found = world(4).run(with_idle_ranks, 2, "load_state_dict")
    assert found == [found[0]] * 4
    assert found[0].startswith(
        "rank 0 called load_state_dict, but rank 2 decide; call the same on all ranks"
    )


def test_one_process_alone_is_told_at_once():
    elastic = make()
    failing(elastic._runtime.worker.optimizer)
    share = next(elastic.shares())
    with pytest.raises(ArithmeticError, match="no such root"):
        elastic.step(*networks.rows(share.samples), share=share, lr=0.1)
    elastic.close()
