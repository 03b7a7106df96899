"""What goes wrong on one rank of an elastic run, while others take part in the same, is raised on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyops.elastic import Elastic
from pyops.elastic.portion import Portion
from tests.elastic import networks
from tests.elastic.test_bad_runs import BATCH, BLOCKS, make

pytestmark = pytest.mark.cpu_only


def told(call: Any) -> str:
    with pytest.raises((ValueError, LookupError, RuntimeError)) as error:
        call()
    return str(error.value)


def rows_failing_on(where: int | None, rank: int) -> Any:
    def rows(share: Portion) -> Any:
        if rank == where:
            raise LookupError("no such row")
        return *networks.rows(share.samples), {}

    return rows


def in_a_step(rank: int, group: Any) -> tuple[str, list[float]]:
    """What each rank is told of a label that replica 1 alone has; losses of the steps that follow."""
    elastic = make(stages=2)
    shares = elastic.shares()
    share = next(shares)
    x, y = networks.rows(share.samples)
    text = told(lambda: elastic.step(x, y + 99 * (rank >= 2), share=share, lr=0.1))
    losses = [elastic.step(*networks.rows(share.samples), share=share, lr=0.1).loss for share in shares]
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
        lambda: Elastic(
            networks.layers(BLOCKS), optimizer=optimizer, loss=networks.loss, samples=networks.SAMPLES, batch=BATCH, seed=5,
            stages=2,
        )
    )  # fmt: skip


def test_an_optimizer_that_one_rank_can_not_make(world):
    assert world(4).run(without_optimizer) == ["optimizer got an empty parameter list"] * 4


def in_a_trial(rank: int, group: Any) -> str:
    return told(lambda: make(stages=2, trial=rows_failing_on(1, rank)))


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
    training = elastic._here.worker is not None and elastic._here.worker.pipeline.training
    elastic.close()
    return texts, found, training


def test_what_goes_wrong_in_an_evaluation_on_one_rank_is_told_to_all(world):
    found = world(4).run(in_an_evaluation)
    for texts, right, training in found:
        assert texts == ["no such row", "no such score"]
        assert right == found[0][1]
        assert training
