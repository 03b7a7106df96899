"""FrozenLayers: what frozen layers say has the same bits computed or read, in whatever
micro-batches, on
any rank."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.elastic import PADDING, ActivationCache, FrozenLayers, Sampler
from pyops.mesh import ALONE
from pyops.models import BERT, GPT, BERTConfig, GPTConfig, ViT, ViTConfig
from pyops.pipeline import Pipeline, PipelineConfig, schedule
from pyops.pipeline.runtime.stage import named_arguments

pytestmark = pytest.mark.cpu_only

SAMPLES, TOKENS, DIM = 22, 5, 16
FROZEN = (1, 2, 2, 4)  # layers, epoch by epoch
SMALL = {"num_layers": 4, "num_heads": 2, "dim": DIM}


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(kind: str) -> nn.Module:
    if kind == "vit":
        return ViT(
            ViTConfig(
                num_labels=3, image_size=4, patch_size=2, num_channels=2, dropout=0.1, **SMALL
            )
        )
    if kind == "bert":
        return BERT(
            BERTConfig(vocab_size=11, sequence_length=TOKENS, dropout=0.1, tied_head=False, **SMALL)
        )
    return GPT(
        GPTConfig(vocab_size=11, sequence_length=TOKENS, dropout=0.1, tied_head=False, **SMALL)
    )


def layers_of(kind: str) -> list[nn.Module]:
    model = model_of(kind)
    return [model.embedding, *model.blocks, model.head]


def batch_of(kind: str, samples: Tensor) -> tuple[Any, dict[str, Any]]:
    """Inputs of the embedding and named arguments of the blocks."""
    draw = torch.Generator().manual_seed(1)
    if kind == "vit":
        return torch.randn(SAMPLES, 2, 4, 4, generator=draw)[samples], {}
    tokens = torch.randint(11, (SAMPLES, TOKENS), generator=draw)[samples]
    if kind == "gpt":
        return tokens, {}
    types = torch.randint(2, (SAMPLES, TOKENS), generator=draw)[samples]
    mask = (
        torch.arange(TOKENS) < torch.randint(2, TOKENS + 1, (SAMPLES, 1), generator=draw)[samples]
    )
    return (tokens, types), {"mask_BT": mask}


def called(prefix: FrozenLayers, kind: str, samples: Tensor, *, micro_batches: int = 1) -> Tensor:
    found = []
    for part in samples.tensor_split(micro_batches):
        inputs, named = batch_of(kind, part)
        shape = {} if kind == "gpt" else {"shape": (len(part), TOKENS)}
        found.append(
            prefix(
                *(inputs if type(inputs) is tuple else (inputs,)), samples=part, **named, **shape
            )
        )
    return torch.cat(found)


class Counted(nn.Module):
    """Rows that come to a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.rows = layer, 0
        self.forward = layer.forward  # type: ignore[method-assign]  # with its signature
        self.register_forward_pre_hook(
            lambda module, x: setattr(self, "rows", self.rows + len(x[0]))
        )


@pytest.mark.parametrize("kind", ["vit", "bert", "gpt"])
def test_read_computed_and_in_other_micro_batches_are_the_same_bits(kind: str):
    layers = layers_of(kind)
    cache = ActivationCache(
        SAMPLES, shape=(TOKENS, DIM), budget=4096 + 15 * (TOKENS * DIM * 4 + 16)
    )
    assert cache.capacity == 15
    sampler, before = Sampler(SAMPLES, batch=9, seed=3), 0
    for epoch, depth in enumerate(FROZEN):
        reading, plain, other = (
            FrozenLayers(layers[:depth], cache=c, chunk=4) for c in (cache, None, None)
        )
        for share in sampler.rest():
            wanted = called(plain, kind, share.samples)
            assert torch.equal(called(reading, kind, share.samples), wanted)
            assert torch.equal(called(other, kind, share.samples, micro_batches=3), wanted)
            inputs, named = batch_of(kind, share.samples)
            x = inputs
            for layer in layers[:depth]:
                some = {name: value for name, value in named.items() if layer is not layers[0]}
                x = layer(*x) if type(x) is tuple else layer(x, **some)
            torch.testing.assert_close(wanted, x)
        assert (
            cache.depths(torch.arange(SAMPLES), seed=reading.key).tolist()
            == [depth] * 15 + [-1] * 7
        )
        assert epoch == 0 or depth >= before
        before = depth


def test_what_is_there_is_not_computed_and_what_is_there_less_deep_is_gone_on_from():
    layers = [Counted(layer) for layer in layers_of("vit")]
    cache = ActivationCache(SAMPLES, shape=(TOKENS, DIM))
    rows = []
    for depth in FROZEN:
        prefix = FrozenLayers(layers[:depth], cache=cache, chunk=1)
        for layer in layers:
            layer.rows = 0
        called(prefix, "vit", torch.arange(12))
        rows.append([layer.rows for layer in layers[:4]])
    assert rows == [[12, 0, 0, 0], [0, 12, 0, 0], [0, 0, 0, 0], [0, 0, 12, 12]]
    for layer in layers:
        layer.rows = 0
    mixed = torch.tensor([3, 15, 4, 16, 17])  # two are there, three are not
    assert torch.equal(
        called(prefix, "vit", mixed), called(FrozenLayers(layers[:4], chunk=1), "vit", mixed)
    )
    assert layers[0].rows == 3 + 5


class Fickle(nn.Module):
    """Bits that depend on the number of rows; with `place` rows or more on the place, of `some`
    rows; `others`: on them."""

    def __init__(self, place: int = 1000, others: int = 1000, some: bool = False) -> None:
        super().__init__()
        self.place, self.others, self.some = place, others, some

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        x = x * (1 + n * 2**-20)
        if n >= self.place:
            x = x + torch.arange(n).view(n, 1) * 2**-18 * (x[:, :1] > 0 if self.some else 1)
        return x + x.mean(dim=0) * 2**-18 if n >= self.others else x


@pytest.mark.parametrize(
    ("layer", "chunk"),
    [
        (Fickle(), 8),
        (Fickle(place=4), 2),
        (Fickle(others=3), 2),
        (Fickle(others=2), 1),
        (Fickle(place=3, some=True), 2),
    ],
)
def test_chunks_are_as_small_as_they_must_be(layer: nn.Module, chunk: int):
    x, samples = torch.randn(30, 6), torch.randperm(30)
    x[0, 0] = -1
    cache = ActivationCache(30, shape=(6,))
    whole, parts = FrozenLayers([layer], chunk=8), FrozenLayers([layer], chunk=8, cache=cache)
    wanted = whole(x)
    assert whole.chunk == chunk
    for part in samples.split(7):
        parts(x[part], samples=part)
    assert torch.equal(parts(x[samples], samples=samples), wanted[samples])
    assert not torch.equal(layer(x), wanted), (
        "this layer depends on nothing, and the test shows nothing"
    )


def _share_tokens(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Bits of rank 1 alone depend on a row's place."""
    layer = Fickle(place=4) if rank else Fickle()
    shared, own = FrozenLayers([layer], chunk=8, group=group), FrozenLayers([layer], chunk=8)
    for prefix in (shared, own):
        prefix(torch.randn(9, 6))
    return shared.chunk, own.chunk


def test_ranks_that_share_out_tokens_compute_as_many_rows_at_a_time(world):
    assert world(2).run(_share_tokens) == [(2, 8), (2, 2)]


def test_what_was_computed_in_other_chunks_is_not_used():
    cache, x, samples = ActivationCache(4, shape=(6,)), torch.randn(4, 6), torch.arange(4)
    FrozenLayers([Fickle()], chunk=4, cache=cache)(x, samples=samples)
    assert torch.equal(
        FrozenLayers([Fickle()], chunk=2, cache=cache)(x, samples=samples),
        FrozenLayers([Fickle()], chunk=2)(x),
    )


class Nosy(nn.Module):
    """Looks at what it is given."""

    def forward(
        self, x: Tensor, shape: tuple[int, int], mask: Tensor, factor: Tensor, other: None = None
    ) -> Tensor:
        assert (shape, len(x), len(mask), factor.shape) == ((4, 9), 4, 4, (6,))
        return torch.where(mask, x, 0) * factor


def test_named_arguments_go_to_the_layers_that_name_them_by_rows():
    prefix = FrozenLayers([nn.Identity(), Nosy()], chunk=4)
    x, mask, factor = torch.randn(7, 6), torch.rand(7, 6) > 0.5, torch.randn(6)
    found = prefix(x, shape=(7, 9), mask=mask, factor=factor)
    torch.testing.assert_close(found, torch.where(mask, x, 0) * factor)
    assert named_arguments(prefix) == {"samples", "input", "x", "shape", "mask", "factor", "other"}


def test_the_augmentation_is_part_of_the_key():
    cache, samples = ActivationCache(4, shape=(6,)), torch.arange(4)
    prefix = FrozenLayers([nn.Linear(6, 6)], chunk=4, cache=cache)
    for epoch in range(3):
        prefix.seed = epoch
        x = torch.randn(4, 6)
        assert torch.equal(prefix(x, samples=samples), prefix(x))


def test_padding_is_neither_read_nor_kept():
    cache = ActivationCache(4, shape=(6,))
    prefix = FrozenLayers([nn.Linear(6, 6)], chunk=2, cache=cache)
    x = torch.randn(3, 6)
    for _ in range(2):
        y = prefix(x, samples=torch.tensor([PADDING, 2, PADDING]))
        assert torch.equal(y[1:2], prefix(x[1:2]))
        assert not y[[0, 2]].any()
    assert cache.depths(torch.arange(4), seed=prefix.key).tolist() == [-1, -1, 1, -1]
    assert torch.equal(prefix(x, samples=torch.full((3,), PADDING)), torch.zeros(3, 6))


def test_it_stays_in_evaluation_and_wants_no_gradients():
    prefix = FrozenLayers([nn.Linear(6, 6), nn.Dropout(0.5)], chunk=2)
    prefix.train()
    assert not any(module.training for module in prefix.modules())
    assert not any(p.requires_grad for p in prefix.parameters())
    x = torch.randn(2, 6)
    y = prefix(x)
    torch.testing.assert_close(y, prefix.layers[0](x))
    assert not y.requires_grad


def test_16_bits_are_a_run_with_rounded_features():
    layers = layers_of("vit")
    cache = ActivationCache(
        SAMPLES,
        shape=(TOKENS, DIM),
        stored=torch.bfloat16,
        budget=4096 + 15 * (TOKENS * DIM * 2 + 16),
    )
    for epoch, depth in enumerate(FROZEN):
        reading, rounding = (
            FrozenLayers(layers[:depth], cache=cache),
            FrozenLayers(layers[:depth], stored=torch.bfloat16),
        )
        samples = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        exact = called(FrozenLayers(layers[:depth]), "vit", samples)
        found = called(reading, "vit", samples, micro_batches=3)
        assert torch.equal(found, called(rounding, "vit", samples))
        assert not torch.equal(found, exact)
        assert torch.equal(found, found.bfloat16().float())
        torch.testing.assert_close(
            found, exact, rtol=0, atol=float(exact.abs().max()) * depth * 2**-8
        )
        if depth == 1:
            assert torch.equal(found, exact.bfloat16().float())
    assert (cache.depths(samples, seed=reading.key) == depth).sum() == 15


@pytest.mark.parametrize("what", ["put", "get"])
def test_without_memory_training_goes_on_and_says_so_once(what: str, monkeypatch, caplog):
    cache, x, samples = ActivationCache(4, shape=(6,)), torch.randn(4, 6), torch.arange(4)
    prefix = FrozenLayers([nn.Linear(6, 6)], chunk=2, cache=cache)

    def fail(*args: Any, **named: Any) -> Any:
        raise OSError(28, "No space left on device")

    wanted = prefix(x)
    prefix(x[:2], samples=samples[:2])
    monkeypatch.setattr(cache, what, fail)
    with caplog.at_level(logging.WARNING, logger="pyops"):
        for _ in range(3):
            assert torch.equal(prefix(x, samples=samples), wanted)
    assert [record.getMessage() for record in caplog.records] == [
        "the cache of frozen layers is off, and training goes on without it: [Errno 28] "
        "No space left on device"
    ]


def trained(
    cache: ActivationCache | None,
    *,
    micro_batches: int = 3,
    group: dist.ProcessGroup | None = None,
    stages: int = 1,
) -> tuple[list[float], list[Tensor]]:
    """Losses, and the weights that this rank trained, of a pipeline with deeper and deeper
    prefixes."""
    layers, sampler, losses = layers_of("bert"), Sampler(SAMPLES, batch=8, seed=3), []
    for layer in layers:
        layer.eval()  # dropout is no part of this
    for depth in FROZEN:
        prefix = FrozenLayers(layers[:depth], cache=cache, chunk=4)
        plan = schedule("1f1b", num_stages=stages, num_microbatches=micro_batches)
        parts = [prefix, *layers[depth:]]
        boundaries = [0, len(parts)] if stages == 1 else [0, 1, len(parts)]
        pipeline = Pipeline(
            parts,
            schedule=plan,
            group=group,
            loss=lambda y, target: nn.functional.cross_entropy(
                y.flatten(0, 1), target.flatten(), reduction="sum"
            ),
            config=PipelineConfig(boundaries=boundaries, reduction="sum"),
        )
        optimizer = torch.optim.SGD(
            [p for p in pipeline.parameters() if p.requires_grad] or [nn.Parameter()], lr=0.01
        )
        for share in sampler.rest():
            samples = share.samples[: len(share.samples) // micro_batches * micro_batches]
            inputs, named = batch_of("bert", samples)
            shape = (len(samples) // micro_batches, TOKENS)
            losses.append(
                float(pipeline.step(inputs, inputs[0], samples=samples, shape=shape, **named))
            )
            optimizer.step()
            optimizer.zero_grad()
        for parameter in nn.ModuleList(layers[depth:]).parameters() if stages > 1 else ():
            dist.broadcast(
                parameter.data, src=1, group=group
            )  # rank 0 freezes some of what rank 1 has trained
    return losses, [p.detach() for p in pipeline.parameters()]


def test_in_a_pipeline():
    cache = ActivationCache(SAMPLES, shape=(TOKENS, DIM))
    losses, weights = trained(None)
    found = trained(cache)
    assert found[0] == losses
    assert all(map(torch.equal, found[1], weights))
    assert losses[0] != losses[-1]


def _over_ranks(rank: int, group: dist.ProcessGroup) -> bool:
    cache = ActivationCache(SAMPLES, shape=(TOKENS, DIM), group=group)
    losses, weights = trained(None, group=group, stages=2)
    found = trained(cache, group=group, stages=2)
    alone = trained(None, group=ALONE)
    return found[0] == losses == alone[0] and all(map(torch.equal, found[1], weights))


def test_in_a_pipeline_of_two_ranks(world):
    assert world(2).run(_over_ranks) == [True, True]


def _replicas(rank: int, group: dist.ProcessGroup) -> list[int]:
    """Rows that this replica computed in each epoch, after checking what it got."""
    layers, cache = (
        [Counted(layer) for layer in layers_of("vit")],
        ActivationCache(SAMPLES, shape=(TOKENS, DIM), group=group),
    )
    sampler, computed = Sampler(SAMPLES, batch=8, seed=5, rank=rank, replicas=2), []
    for depth in FROZEN:
        prefix, plain = (
            FrozenLayers(layers[:depth], cache=cache, chunk=1),
            FrozenLayers(layers[:depth], chunk=1),
        )
        computed.append(0)
        for share in sampler.rest():
            before = layers[depth - 1].rows
            found = called(prefix, "vit", share.samples)
            computed[-1] += layers[depth - 1].rows - before
            assert torch.equal(found, called(plain, "vit", share.samples))
            dist.barrier(group)
    return computed


def test_replicas_read_what_others_kept(world):
    assert world(2).run(_replicas) == [[11, 11, 0, 11]] * 2


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FrozenLayers([]), ValueError, "a prefix of no layers"),
        (
            lambda: FrozenLayers([nn.Identity()], chunk=0),
            ValueError,
            "chunk is 0; it must be a whole number, 1 or more",
        ),
        (
            lambda: FrozenLayers(
                [nn.Identity()], cache=ActivationCache(2, shape=(2,)), stored=torch.half
            ),
            ValueError,
            "one of them",
        ),
        (
            lambda: FrozenLayers([nn.Identity()])(torch.zeros(0, 2)),
            ValueError,
            "were given no rows",
        ),
        (
            lambda: FrozenLayers([nn.Identity()])(torch.zeros(3, 2), samples=torch.arange(2)),
            ValueError,
            "the batch has 3 rows",
        ),
        (
            lambda: FrozenLayers([nn.LSTM(2, 2)])(torch.zeros(3, 2)),
            TypeError,
            "last frozen layer returned a tuple",
        ),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()
