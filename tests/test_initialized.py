"""Ranks that torchrun started and that nobody joined: every strategy refuses to work alone, and
says what to call first."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import pyops
from pyops import (
    checkpoint,
    comm,
    data,
    elastic,
    hub,
    onebit,
    pruning,
    quantized,
    tensor_parallel,
    token_data,
)
from pyops.comm.agreement import agree, gather, on_all_ranks, on_first_rank, ranks_agree
from pyops.comm.compression.one_bit import OneBit
from pyops.context_parallel import token_mean
from pyops.data import DataConfig
from pyops.data_parallel import DataParallel
from pyops.local_sgd import LocalSGD
from pyops.mesh import Axes, Mesh, alone, check_initialized, resolve
from pyops.models import (
    BERT,
    GPT,
    T5,
    BERTClassifier,
    BERTConfig,
    CoAtNet,
    CoAtNetConfig,
    GPTConfig,
    T5Config,
    ViT,
    ViTConfig,
)
from pyops.observe import compare_replicas
from pyops.optim import AdamW
from pyops.pipeline import Pipeline, schedule
from pyops.plan import ImageShape, ModelShape, measure_blocks, measure_layers
from pyops.precision import LossScaler, overflowed
from pyops.tensor_parallel.grids import Grid
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.elastic import networks

pytestmark = pytest.mark.cpu_only

TP = tensor_parallel
X = torch.zeros(4)
MODELS: list[tuple[Any, Any]] = [
    (GPT, GPTConfig),
    (BERT, BERTConfig),
    (T5, T5Config),
    (ViT, ViTConfig),
    (CoAtNet, CoAtNetConfig),
]
ONE_BIT: list[tuple[Any, dict[str, int]]] = [
    (onebit.OneBitAdam, {"config": onebit.OneBitConfig(warmup_steps=3)}),
    (onebit.OneBitLAMB, {"config": onebit.OneBitLAMBConfig(warmup_steps=3)}),
    (onebit.ZeroOneAdam, {}),
]


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def packing() -> Any:
    return elastic.pack([1.0] * 4, frozen=0, stages=1, batch=8)


def one_bit(kind: Any, options: dict[str, int]) -> Any:
    return kind([nn.Parameter(torch.zeros(4))], lr=1e-3, **options)


def divergence() -> Any:
    side = TP.LinearLogits(torch.zeros(2, 4), torch.zeros(8, 4))
    return TP.linear_kl_divergence(side, side)


def train(model: nn.Module, masks: Any, *, first: int, last: int | None) -> None:
    return None


def whole(model: nn.Module) -> Any:
    model.placements = {}
    return tensor_parallel.whole_state_dict(model)


CALLS: dict[str, Callable[[], Any]] = {
    "checkpoint.BackgroundSaver": lambda: checkpoint.BackgroundSaver().save("never", {}),
    "checkpoint.MemoryCheckpoints": lambda: checkpoint.MemoryCheckpoints("never", run="a1"),
    "checkpoint.Checkpoints": lambda: checkpoint.Checkpoints("never").save(1, {}),
    "checkpoint.load": lambda: checkpoint.load("never"),
    "checkpoint.save": lambda: checkpoint.save("never", {}),
    "comm.Communicator": lambda: comm.Communicator.of(),
    "comm.all_gather": lambda: comm.all_gather(X),
    "comm.all_reduce": lambda: comm.all_reduce(X),
    "comm.compressed_all_gather": lambda: comm.compressed_all_gather(X, codec=OneBit()),
    "comm.compressed_all_reduce": lambda: comm.compressed_all_reduce(X, codec=OneBit()),
    "comm.compressed_reduce_scatter": lambda: comm.compressed_reduce_scatter(X, codec=OneBit()),
    "comm.ddp_hook": lambda: comm.ddp_hook(OneBit()),
    "comm.reduce_scatter": lambda: comm.reduce_scatter(X),
    "comm.agreement.agree": lambda: agree(None),
    "comm.agreement.gather": lambda: gather(1),
    "comm.agreement.on_all_ranks": lambda: on_all_ranks(pytest.fail),
    "comm.agreement.on_first_rank": lambda: on_first_rank(pytest.fail),
    "comm.agreement.ranks_agree": lambda: ranks_agree().__enter__(),
    "data.prepare": lambda: data.prepare(DataConfig()),
    "token_data.packed_rows": lambda: token_data.packed_rows(
        cast(Any, SimpleNamespace(digest="d")), sequence_length=4, cache="nowhere"
    ),
    "data.prepare_passages": lambda: data.prepare_passages(
        DataConfig(path="stdlib"), vocab_size=300, length=8
    ),
    "data_parallel.DataParallel": lambda: DataParallel(linear()),
    "distill.linear_kl_divergence": lambda: divergence(),
    "elastic.Elastic": lambda: elastic.Elastic(
        networks.layers(2),
        optimizer=networks.optimizer,
        loss=networks.loss,
        data=elastic.ElasticData(samples=8, batch=4, seed=0),
    ),
    "elastic.agree_on": lambda: elastic.agree_on(1),
    "elastic.carry": lambda: elastic.carry(
        {}, *[elastic.Layout(ranks=1, stages=1, replicas=1, boundaries=(0, 3))] * 2
    ),
    "elastic.confirm": lambda: elastic.confirm(packing(), pytest.fail),
    "elastic.make_control_group": elastic.make_control_group,
    "elastic.reading_pays": lambda: elastic.reading_pays(None),
    "elastic.rows_besides": lambda: elastic.rows_besides(
        pytest.fail, pytest.fail, loss=pytest.fail, rows=4
    ),
    "hub.load": lambda: hub.load("never", group=None),
    "hub.save": lambda: hub.save(linear(), "never", group=None),
    "local_sgd.LocalSGD": lambda: LocalSGD(
        model := linear(), torch.optim.SGD(model.parameters(), lr=0.1)
    ),
    "mesh.Mesh": lambda: Mesh(Axes()),
    "tensor_parallel.grids.Grid.of": Grid.of,
    "mesh.check_initialized": lambda: check_initialized("this"),
    "mesh.resolve": lambda: resolve(None, "this"),
    "observe.compare_replicas": lambda: compare_replicas({"w": X}),
    "models.BERTClassifier": lambda: BERTClassifier(
        BERTConfig(), num_labels=2, group=None, device="meta"
    ),
    **{
        f"models.{kind.__name__}": partial(kind, config(), group=None, device="meta", seed=None)
        for kind, config in MODELS
    },
    **{f"onebit.{kind.__name__}": partial(one_bit, kind, options) for kind, options in ONE_BIT},
    "context_parallel.token_mean": lambda: token_mean(torch.zeros(()), 1),
    "pipeline.Pipeline": lambda: Pipeline(
        [linear()], schedule=schedule("1f1b", num_stages=1, num_microbatches=1)
    ),
    "plan.measure_blocks": lambda: measure_blocks(ModelShape.of_gpt(GPTConfig())),
    "plan.measure_layers": lambda: measure_layers(ImageShape.named("coatnet-0")),
    "precision.LossScaler": LossScaler,
    "precision.overflowed": lambda: overflowed([X]),
    "pruning.gradual": lambda: pruning.gradual(
        linear(), AdamW(linear().parameters()), pruning.CubicSchedule(0.5, 1, 1, 1), only=["*"]
    ),
    "pruning.kth_magnitude": lambda: pruning.kth_magnitude([X], 1),
    "pruning.lottery": lambda: next(
        pruning.lottery(lambda seed: linear(), train, pruning.LotteryConfig(rounds=1, only=["*"]))
    ),
    "pruning.magnitude": lambda: pruning.magnitude(linear(), 0.5, only=["*"]),
    "pruning.masks_from_state": lambda: pruning.masks_from_state(linear(), {}),
    "pruning.masks_state": lambda: pruning.masks_state(
        pruning.Masks(linear(), {"weight": torch.ones(4, 4, dtype=torch.bool)})
    ),
    "quantized.aware": lambda: quantized.aware(linear(), quantized.Scheme(), group=None),
    "quantized.awq": lambda: quantized.awq(linear(), quantized.Int8(), [X], group=None),
    "quantized.calibrate": lambda: quantized.calibrate(linear(), [X], group=None),
    "quantized.convert": lambda: quantized.convert(linear(), group=None),
    "quantized.gptq": lambda: quantized.gptq(linear(), quantized.Int8(), [X], group=None),
    "quantized.smooth": lambda: quantized.smooth(linear(), [X], group=None),
    "tensor_parallel.ColumnParallelLinear": lambda: TP.ColumnParallelLinear(4, 4),
    "tensor_parallel.Dropout": lambda: TP.Dropout(0.1, width=4),
    "tensor_parallel.LayerNorm": lambda: TP.LayerNorm(4),
    "tensor_parallel.ParallelAttention": lambda: TP.ParallelAttention(4, 2),
    "tensor_parallel.ParallelMLP": lambda: TP.ParallelMLP(4, 8),
    "tensor_parallel.RMSNorm": lambda: TP.RMSNorm(4),
    "tensor_parallel.Ranks": lambda: TP.Ranks.of(None),
    "tensor_parallel.RelativeBias": lambda: TP.RelativeBias(2),
    "tensor_parallel.RowParallelLinear": lambda: TP.RowParallelLinear(4, 4),
    "tensor_parallel.VocabParallelEmbedding": lambda: TP.VocabParallelEmbedding(8, 4),
    "tensor_parallel.clip_grad_norm_": lambda: TP.clip_grad_norm_(linear(), 1.0),
    "tensor_parallel.sync_partial_grads": lambda: TP.sync_partial_grads(linear()),
    "tensor_parallel.grad_norm": lambda: TP.grad_norm(linear()),
    "tensor_parallel.linear_cross_entropy": lambda: TP.linear_cross_entropy(
        torch.zeros(2, 4), torch.zeros(8, 4), torch.zeros(2, dtype=torch.int64)
    ),
    "tensor_parallel.linear_kl_divergence": lambda: divergence(),
    "tensor_parallel.parallelize": lambda: TP.parallelize(nn.TransformerEncoderLayer(8, 2)),
    "tensor_parallel.vocab_parallel_cross_entropy": lambda: TP.vocab_parallel_cross_entropy(
        torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    ),
    "tensor_parallel.whole_state_dict": lambda: whole(linear()),
    "zero.ZeroOptimizer": lambda: ZeroOptimizer(linear(), AdamW, ZeroConfig(stage=1), lr=1e-3),
}  # fmt: skip

# Public callables with such an argument for which None is not "all ranks".
OTHERWISE = {
    "adapters.load": "the ranks that the model was made for, or this process alone",
    "adapters.save": "the ranks that the model was made for, or this process alone",
    "comm.ErrorFeedback": "its communicator only states rank and size, which may be numbers",
    "comm.Reducer": "a communicator, or None, is always given",
    "comm.release": "lets go of what is there",
    "flight_record.begin_in": "notes a call in a group that there is",
    "flight_record.kind_in": "prepares notes of calls in a group that there is",
    "flight_record.message": "is around a wait in a group that there is",
    "failure.lost_peer": "says what to raise after a collective",
    "failure.naming_lost_ranks": "is around a collective",
    "failure.ranks_without_note": "comes after a collective that failed",
    "failure.wake_neighbours": "comes after a collective that failed",
    "elastic.LayoutGroups": "the group of all ranks, or None for one process, is always given",
    "elastic.abort_on_failure": "is around what ranks do in groups that they have",
    "elastic.ActivationCache": "memory of this process alone",
    "elastic.FrozenLayers": "this process alone, by default",
    "elastic.open_cache": "memory of this process alone",
    "config.ZeroConfig": "options of ZeroOptimizer",
    "zero.ZeroConfig": "options of ZeroOptimizer",
    "mesh.axis_group": "hands on what a class was given, which asks",
    "onebit.OneBitConfig": "options of an optimizer that is tried",
    "onebit.OneBitLAMBConfig": "options of an optimizer that is tried",
    "onebit.ZeroOneConfig": "options of an optimizer that is tried",
    "pruning.load": "the ranks that the model was made for, or this process alone",
    "pruning.save": "the ranks that the model was made for, or this process alone",
    "pipeline.profile": "measures this process alone",
    "compress.QuantizeStep": "inputs that share a scale",
    "quantized.Int4": "inputs that share a scale",
    "quantized.IntN": "inputs that share a scale",
    "quantized.load": "the ranks that the model was made for, or this process alone",
    "quantized.save": "the ranks that the model was made for, or this process alone",
    "pruning.Gradual": "made by pruning.gradual",
    "recompute.apply": "inputs are kept whole",
    "recompute.checkpoint": "inputs are kept whole",
}


def public() -> set[str]:
    """Every public callable of every room that takes a group, or a communicator."""
    found = set()
    for room in pyops._ROOMS:
        module = importlib.import_module(f"pyops.{room}")
        for name in getattr(module, "__all__", ()):
            try:
                names = list(inspect.signature(getattr(module, name)).parameters)
            except (TypeError, ValueError):
                continue
            if any(
                each in ("communicator", "group") or each.endswith("_group")
                for each in set(names) - {"param_group"}
            ):
                found.add(f"{room}.{name}")
    return found


def test_nothing_that_takes_a_group_is_forgotten():
    assert public() - set(CALLS) - set(OTHERWISE) == set()
    assert set(OTHERWISE) <= public()


@pytest.mark.parametrize("name", CALLS)
def test_ranks_that_nobody_joined_are_refused(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError,
        match=r"torch.distributed is not initialised.*WORLD_SIZE=2.*init_process_group\(\)",
    ):
        CALLS[name]()
    assert list(tmp_path.iterdir()) == [], "nothing is written before"


def test_the_name_of_the_strategy_is_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("DataParallel", "ZeroOptimizer", "Pipeline", "Mesh", "Elastic", "LossScaler"):
        call = next(each for full, each in CALLS.items() if full.endswith(f".{name}"))
        with pytest.raises(ValueError, match=f"^{name}: "):
            call()


@pytest.mark.parametrize("size", [None, "1", "", "auto"])
def test_one_process_works_alone(size, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    for name in (
        "data_parallel.DataParallel",
        "zero.ZeroOptimizer",
        "pipeline.Pipeline",
        "mesh.Mesh",
        "comm.agreement.gather",
    ):
        CALLS[name]()


def test_what_is_local_works_beside_ranks_that_nobody_joined(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = linear()
    model(torch.ones(2, 4)).sum().backward()
    before = model.weight.detach().clone()
    AdamW(model.parameters(), lr=1e-3).step()
    assert not torch.equal(model.weight, before)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Unknown"]}))
    with alone():
        assert Mesh(Axes()).group("dp") is None
        DataParallel(model)
        with pytest.raises(hub.HubError):
            hub.load(tmp_path)
    with pytest.raises(ValueError, match="not initialised"):
        DataParallel(model)


def _with_size(rank: int, group: Any) -> bool:
    """Ranks that were joined work, whatever the environment says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        model = DataParallel(linear())
        model(torch.full((1, 4), float(rank))).sum().backward()
        gradient = model.module.weight.grad
        return gradient is not None and bool((gradient == 0.5).all())


def test_ranks_that_were_joined_work(world):
    assert world(2).run(_with_size) == [True, True]
