"""Calibration and training with quantization in mind of one model on several ranks: what one rank
would have found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pyops.optim
from pyops.mesh import ALONE
from pyops.models import GPT
from pyops.quantized import Codes, Int4, Int8, IntN, Scheme
from pyops.quantized.calibration import awq, calibrate, gptq, smooth
from pyops.quantized.training import aware
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.quantized.test_methods import CONFIG as GROUPED
from tests.quantized.test_methods import TOKEN, codes_of, tokens

pytestmark = pytest.mark.cpu_only

CONFIG = replace(GROUPED, num_kv_heads=0)
METHODS = ("calibrate", "smooth", "awq", "gptq", "aware")


def model(group: object) -> GPT:
    made = GPT(CONFIG, group=group, dtype=torch.float64).eval()
    with torch.no_grad():
        for block in made.blocks:
            block.norm1.weight[3] *= 20
    return made


def found(method: str, group: object, share: object = ALONE) -> list[Tensor]:
    """What a method finds or makes; `share`: ranks that have every other example."""
    made, batches = model(group), tokens()
    if share is not ALONE:
        batches = batches[dist.get_rank(share) :: dist.get_world_size(share)]
    if method == "calibrate":
        ranges = calibrate(made, batches, format=Int8(per="tensor", symmetric=False), group=share)
        return [end.double() for found in ranges.values() for end in found]
    if method == "smooth":
        return [s.double() for s in smooth(made, batches, group=share).values()]
    if method == "awq":
        best = awq(made, IntN(3, group=16), batches, group=share)
        return [torch.tensor([*best.values()]), made.blocks[0].norm1.weight.detach()]
    if method == "gptq":
        with_codes = gptq(made, Int4(group=16), batches, group=share)
        return [_whole(codes, made.get_submodule(name)) for name, codes in with_codes.items()]
    made.train()
    with aware(made, Scheme(IntN(4), Int8(per="token")), group=share) as training:
        logits = made(tokens()[0]).detach()
        codes = training.codes()
    return [logits, *(_whole(c, made.get_submodule(name)) for name, c in codes.items())]


def _whole(codes: Codes, layer: nn.Module) -> Tensor:
    """The codes of the layer's whole weight, from those of all ranks."""
    place, ranks = layer.placements["weight"], layer.plan.ranks
    own = codes.codes.view(place.local_shape).float()
    if ranks.size == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(ranks.size)]
    dist.all_gather(parts, own.contiguous(), group=ranks.process_group)
    return torch.cat(parts, place.dim)


def cut(rank: int, group: object) -> dict[str, list[Tensor]]:
    return {method: found(method, group) for method in METHODS}


def shared(rank: int, group: object) -> dict[str, list[Tensor]]:
    return {method: found(method, ALONE, group) for method in METHODS[:4]}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Tensor]]:
    return {method: found(method, ALONE) for method in METHODS}


def compare(own: list[Tensor], expected: list[Tensor]) -> None:
    """Codes are equal but where a sum in another order of ranks moves a tie."""
    assert len(own) == len(expected) > 1
    for a, b in zip(own, expected, strict=True):
        if torch.equal(b, b.round()):
            assert (a - b).abs().max() <= 1
            assert (a != b).double().mean() < 2e-3
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert b.abs().max() > 0 or b.numel() == 1


@pytest.mark.full
def test_layers_cut_over_two_ranks(world, alone):
    for results in world(2).run(cut):
        for method, own in results.items():
            compare(own, alone[method])


def test_examples_shared_out_over_two_ranks(world, alone):
    for results in world(2).run(shared):
        for method, own in results.items():
            compare(own, alone[method])


def _refused(rank: int, group: object) -> str:
    with pytest.raises(ValueError, match="has its inputs on 2 ranks; learned steps") as error:
        aware(model(group), Scheme(), learn_steps=True)
    return str(error.value)


def _sequence_parallel(rank: int, group: object) -> str:
    made = GPT(CONFIG, group=group, sequence_parallel=True).eval()
    with pytest.raises(ValueError, match="sequence_parallel=False to calibrate it") as error:
        calibrate(made, tokens())
    return str(error.value)


def test_what_is_refused_on_ranks(world):
    for body in (_refused, _sequence_parallel):
        first, second = world(2).run(body)
        assert first == second


def trained(rank: int, group: Any) -> dict[str, Tensor]:
    """Weights and codes after three steps with quantization in mind; `group`: ranks that share out
    rows and, by ZeRO, parameters."""
    made, options = GPT(CONFIG), {"lr": 0.5, "momentum": 0.9}
    ranks = 1 if group is ALONE else dist.get_world_size(group)
    with aware(made, TOKEN) as training:
        if group is ALONE:
            optimizer: Any = pyops.optim.SGD(made.parameters(), **options)
        else:
            config = ZeroConfig(stage=3)
            optimizer = ZeroOptimizer(made, pyops.optim.SGD, config, group=group, **options)
        for batch in tokens()[:3]:
            own = batch.tensor_split(ranks)[rank]
            optimizer.zero_grad()
            made.loss(own, own).backward()
            optimizer.step()
        if group is not ALONE:
            with pytest.raises(RuntimeError, match="whole_parameters"):
                training.codes()
            optimizer.close()
        weights = {name: p.detach().clone() for name, p in made.named_parameters()}
        training.convert()
    return weights | codes_of(made)


def test_training_with_parameters_shared_out(world):
    """By ZeRO at stage 3: the weights of one process that has all rows, and their codes."""
    expected, start = trained(0, ALONE), GPT(CONFIG).state_dict()
    for own in world(2).run(trained):
        assert own.keys() == expected.keys()
        for name, b in expected.items():
            if b.dtype == torch.int8:
                assert (own[name] != b).double().mean() < 2e-3
            else:
                torch.testing.assert_close(own[name], b, rtol=1e-4, atol=1e-6)
                assert (b - start[name]).abs().max() > 1e-4
