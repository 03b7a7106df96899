"""Freeze policies: the paper's sequences, the gradient rule against one written down apart, and
what nobody may decide."""

from __future__ import annotations

import itertools
import json
import math
import random
from fractions import Fraction

import pytest
import torch.distributed as dist

from pyops.elastic import Bound, Callback, GradientNorm, PercentileOfChange, Policy, agree_on

pytestmark = pytest.mark.cpu_only

# ceil(L (1 - (1 - alpha)^T)) for T = 0, 1, ...
SEQUENCES = {
    (12, Fraction(1, 3)): [0, 4, 7, 9, 10, 11, 11, 12, 12, 12],
    (12, Fraction(1, 2)): [0, 6, 9, 11, 12, 12],
    (12, Fraction(1, 5)): [0, 3, 5, 6, 8, 9, 9, 10, 10, 11],
}


def sequence(policy: Policy, layers: int, decisions: int, norms=None) -> list[int]:
    found = [0]
    for t in range(decisions):
        found.append(policy.decide(norms[t] if norms else [1.0] * layers, found[-1]))
    return found


@pytest.mark.parametrize(("layers", "alpha"), SEQUENCES)
def test_the_papers_sequences(layers: int, alpha: Fraction):
    wanted = SEQUENCES[layers, alpha]
    assert sequence(Bound(float(alpha)), layers, len(wanted) - 1) == wanted


@pytest.mark.parametrize("layers", [12, 24])
@pytest.mark.parametrize(
    "alpha", [Fraction(1, 5), Fraction(1, 4), Fraction(1, 3), Fraction(2, 5), Fraction(1, 2)]
)
def test_equals_the_closed_form(layers: int, alpha: Fraction):
    wanted = [math.ceil(layers * (1 - (1 - alpha) ** t)) for t in range(30)]
    assert sequence(Bound(float(alpha)), layers, 29) == wanted
    # where the highest layer has the least norm, the bound is all that holds the gradient rule back
    falling = [[float(layers - i) for i in range(layers)]] * 29
    assert sequence(GradientNorm(float(alpha)), layers, 29, falling) == wanted


def reference(norms: list[list[float]], alpha: Fraction) -> list[int]:
    """The rule in plain words, with the unrounded value carried."""
    value, told = Fraction(0), [0]
    for now in norms:
        layers, frozen = len(now), told[-1]
        bound = value + alpha * (layers - value)
        active = now[frozen:]
        if not active:
            told.append(frozen)
            continue
        converged = frozen + active.index(min(active)) + 1
        value = min(bound, Fraction(converged))
        told.append(math.ceil(value))
        if layers - value < 1:
            value = Fraction(layers)
    return told


@pytest.mark.parametrize("layers", [12, 24])
@pytest.mark.parametrize("alpha", [Fraction(1, 5), Fraction(1, 3), Fraction(1, 2)])
def test_gradient_rule_on_recorded_norms(layers: int, alpha: Fraction):
    held_back = 0
    for seed in range(40):
        draw = random.Random(seed)
        norms = [[draw.lognormvariate(0.15 * i, 0.7) for i in range(layers)] for _ in range(12)]
        found = sequence(GradientNorm(float(alpha)), layers, 12, norms)
        assert found == reference(norms, alpha)
        assert all(a <= b for a, b in itertools.pairwise(found))
        held_back += found != sequence(Bound(float(alpha)), layers, 12)
    assert held_back > 20, "the norms must decide something"


def test_the_gradient_rule_by_hand():
    policy = GradientNorm(0.5)
    assert policy.decide([3, 1, 2, 4, 5, 6, 7, 8], 0) == 2, (
        "layer 1 has converged, and what is below it"
    )
    assert policy.decide([0, 0, 2, 4, 5, 6, 7, 1], 2) == 5, (
        "the bound: half of what is active; frozen layers' norms are nothing"
    )
    assert policy.decide([0, 0, 0, 0, 0, 6, 6, 7], 5) == 6, "of equal norms the lowest"


def test_norms_of_frozen_layers_are_not_looked_at():
    nan = float("nan")
    assert GradientNorm(0.5).decide([nan, nan, 1.0, 2.0], 2) == 3
    with pytest.raises(ValueError, match="the gradient norm of layer 3 is nan"):
        GradientNorm(0.5).decide([nan, nan, 1.0, nan], 2)


def test_begins_anew_from_what_the_caller_froze():
    policy = Bound(1 / 3)
    assert policy.decide([1.0] * 12, 0) == 4
    assert policy.decide([1.0] * 12, 6) == 8
    assert policy.decide([1.0] * 12, 8) == 10  # 6 + 6 (1 - 4 / 9) = 9.33


def test_percentile_of_change():
    policy = PercentileOfChange(50)
    assert policy.decide([1.0, 1.0, 1.0, 1.0, 1.0], 0) == 0, "nothing to compare with"
    assert policy.decide([1.1, 1.2, 2.0, 1.05, 1.3], 0) == 1, (
        "0.1 is less than the median 0.2, 0.2 is not"
    )
    assert policy.decide([9.0, 1.2, 2.0, 2.0, 1.31], 1) == 3, (
        "of the active: 0, 0, 0.9, 0.008; less than 0.004 are two"
    )
    assert policy.decide([9.0, 1.2, 2.0, 2.0, 9.31], 3) == 4, "the change of 0 at layer 3"
    assert policy.decide([9.0, 1.2, 2.0, 2.0, 9.31], 4) == 4, "the last layer stays"


def test_policies_that_freeze_nothing():
    draw = random.Random(0)
    norms = [[draw.random() for _ in range(6)] for _ in range(8)]
    assert sequence(PercentileOfChange(0), 6, 8, norms) == [0] * 9
    assert sequence(PercentileOfChange(50), 6, 8) == [0] * 9, (
        "no change is less than that of the others"
    )
    assert sequence(Callback(lambda norms, frozen: frozen), 6, 8) == [0] * 9


def test_policies_that_freeze_everything():
    assert sequence(Callback(lambda norms, frozen: len(norms)), 6, 2) == [0, 6, 6]
    assert sequence(Bound(0.999), 12, 3) == [0, 12, 12, 12]
    assert GradientNorm(0.5).decide([], 0) == 0
    assert sequence(GradientNorm(0.5), 1, 2) == [0, 1, 1]


def test_a_change_from_or_to_nothing():
    policy = PercentileOfChange(50)
    policy.decide([0.0, 0.0, 1.0], 0)
    assert policy.decide([0.0, 5.0, 1.1], 0) == 1, "changes 0, infinite, 0.1"


@pytest.mark.parametrize(
    "policy",
    [Bound(1 / 3), GradientNorm(1 / 3), PercentileOfChange(40)],
    ids=lambda p: type(p).__name__,
)
def test_state_goes_through_json(policy: Policy):
    draw = random.Random(3)
    norms = [[draw.lognormvariate(0, 1) for _ in range(24)] for _ in range(9)]
    first = sequence(policy, 24, 4, norms)
    other = {
        Bound: Bound(1 / 3),
        GradientNorm: GradientNorm(1 / 3),
        PercentileOfChange: PercentileOfChange(40),
    }[type(policy)]
    other.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    one, two = [first[-1]], [first[-1]]
    for now in norms[4:]:
        one.append(policy.decide(now, one[-1]))
        two.append(other.decide(now, two[-1]))
    assert one == two
    assert one[-1] > one[0], "nothing was decided"
    with pytest.raises(ValueError, match="the state is of the policy"):
        Callback(len).load_state_dict(policy.state_dict())


class _Every:
    """A callback that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, norms, frozen):
        self.calls += 1
        return min(len(norms), frozen + self.calls % 2)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_a_callbacks_own_state_is_kept():
    policy, other = Callback(_Every()), Callback(_Every())
    assert policy.decide([1.0] * 4, 0) == 1
    other.load_state_dict(policy.state_dict())
    assert other.decide([1.0] * 4, 1) == 1


@pytest.mark.parametrize("found", [2, 5, 3.0, True, None])
def test_a_callback_may_not_thaw_nor_invent_layers(found):
    with pytest.raises(ValueError, match=r"would freeze .* from 3, which are frozen already, to 4"):
        Callback(lambda norms, frozen: found).decide([1.0] * 4, 3)


@pytest.mark.parametrize("alpha", [0, 1, -0.5, 2, True, 1e-9, float("nan")])
def test_alpha_is_a_part(alpha):
    with pytest.raises(ValueError, match="alpha is"):
        Bound(alpha)


@pytest.mark.parametrize("frozen", [-1, 5, 2.0, True])
def test_frozen_is_a_number_of_layers(frozen):
    with pytest.raises(ValueError, match="whole number from 0 to 4"):
        Bound(0.5).decide([1.0] * 4, frozen)


def test_an_error_changes_nothing():
    policy = GradientNorm(1 / 3)
    policy.decide([1.0] * 12, 0)
    before = policy.state_dict()
    with pytest.raises(ValueError):
        policy.decide([float("inf")] * 12, 1)
    assert policy.state_dict() == before


def _disagree(rank: int, group: dist.ProcessGroup) -> str:
    assert agree_on(4, group) == 4
    with pytest.raises(ValueError) as caught:
        agree_on(5 if rank == 1 else 4, group)
    return str(caught.value)


def test_ranks_that_disagree_are_told_both_decisions(world):
    messages = world(2).run(_disagree)
    assert messages[0] == messages[1]
    assert "rank 0 would freeze 4 layers, but rank 1 5" in messages[0]
