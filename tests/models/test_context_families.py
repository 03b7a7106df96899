"""T5, ViT, BERT with its pooled head, and the classifier are what they are on one rank where ranks
share out the tokens of their rows: losses, gradients, dropped elements, training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.comm.collectives.transport import run_virtual
from pyops.context_parallel import ContextRanks
from pyops.data_parallel import DataParallel
from pyops.mesh import Axes, Mesh
from pyops.models import (
    BERT,
    T5,
    BERTClassifier,
    BERTConfig,
    T5Config,
    ViT,
    ViTConfig,
)
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import full

pytestmark = pytest.mark.cpu_only

B, S, T, V = 2, 16, 24, 13  # an encoder's tokens, a decoder's, a vocabulary
STEPS = 10
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 4,
    "dim": 16,
    "dropout": 0.2,
    "attention_dropout": 0.2,
}
BERT_CONFIG = BERTConfig(vocab_size=V, sequence_length=S, **SIZES)
ROFORMER = BERTConfig(vocab_size=V, sequence_length=S, positions="rotary", **SIZES)


def _t5(context: ContextRanks | None, order: str, dtype: torch.dtype, **layout: Any) -> T5:
    config = T5Config(
        vocab_size=V, num_buckets=8, max_distance=10, activation="gated_gelu", **SIZES
    )
    return T5(config, context=context, order=order, dtype=dtype, **layout)


def _vit(side: int) -> Callable[..., ViT]:
    def make(context: ContextRanks | None, order: str, dtype: torch.dtype, **layout: Any) -> ViT:
        config = ViTConfig(num_labels=V, image_size=2 * side, patch_size=2, **SIZES)
        return ViT(config, context=context, order=order, dtype=dtype, **layout)

    return make


def _bert(config: BERTConfig) -> Callable[..., BERT]:
    def make(context: ContextRanks | None, order: str, dtype: torch.dtype, **layout: Any) -> BERT:
        return BERT(config, context=context, order=order, dtype=dtype, **layout)

    return make


def _classifier(
    context: ContextRanks | None, order: str, dtype: torch.dtype, **layout: Any
) -> BERTClassifier:
    return BERTClassifier(BERT_CONFIG, num_labels=V, context=context, dtype=dtype, **layout)


MODELS: dict[str, Callable[..., Any]] = {
    "T5": _t5,
    "ViT of 10 tokens": _vit(3),
    "ViT of 17 tokens": _vit(4),
    "BERT": _bert(BERT_CONFIG),
    "RoFormer": _bert(ROFORMER),
    "classifier": _classifier,
}


def _loss(model: Any, *, step: int, through: Any = None, reduction: str = "sum") -> Tensor:
    """Of a batch of its own, in which ranks have other numbers of targets."""
    generator = torch.Generator().manual_seed(2)

    def tokens(length: int, high: int = V) -> Tensor:
        return torch.randint(high, (B, length), generator=generator)

    call, key = through or model, {"seed": 9, "step": step, "first_row": 5}
    if isinstance(model, ViT):
        side = model.config.image_size
        images = torch.randn(B, 3, side, side, generator=generator, dtype=torch.float64)
        model.set_dropout(B, **key)
        return call(images.to(next(model.parameters()).dtype), tokens(1)[:, 0], reduction=reduction)
    given, mask = tokens(S), torch.ones(B, S, dtype=torch.bool)
    mask[0, S - 3 :] = mask[1, S - 9 :] = False
    if isinstance(model, T5):
        targets = tokens(T)
        targets[0, : T // 2] = -100
        model.set_dropout((B, S), (B, T), **key)
        return call(given, model.shifted(targets), targets, mask=mask, reduction=reduction)
    model.set_dropout((B, S), **key)
    types = (torch.arange(S) > 5).long().expand(B, S)
    if isinstance(model, BERTClassifier):
        return call(given, tokens(1)[:, 0], types=types, mask=mask, reduction=reduction)
    targets, following = tokens(S), tokens(1, high=2)[:, 0]
    targets[0, : S // 2] = -100
    return call(given, targets, types=types, mask=mask, next_B=following, reduction=reduction)


def _gradients(name: str, context: ContextRanks | None, order: str) -> dict[str, Tensor]:
    model = MODELS[name](context, order, torch.float64)
    total = _loss(model, step=3)
    total.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": total.detach(), **found}


TEAMS = [
    (2, "gather", None, "zigzag"),
    (2, "ulysses", None, "contiguous"),
    (2, "ring", None, "striped"),
    (4, "ring", 2, "contiguous"),
]


@pytest.mark.parametrize(
    ("size", "method", "heads", "order"),
    [
        *TEAMS,
        full(3, "gather", None, "contiguous"),
        full(4, "gather", None, "striped"),
        full(4, "ulysses", None, "zigzag"),
        full(4, "ring", None, "zigzag"),
        full(4, "gather", 2, "zigzag"),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_one_rank(
    name: str, size: int, method: str, heads: int | None, order: str
) -> None:
    if size == 3 and not name.startswith("ViT"):
        pytest.skip("16 tokens can't be shared out over 3 ranks")
    expected = _gradients(name, None, order)

    def body(transport: Any) -> dict[str, Tensor]:
        return _gradients(name, ContextRanks.of(transport, method=method, heads=heads), order)

    found = run_virtual(size, body)
    largest = max(float(whole.norm()) for whole in expected.values())
    for key, whole in expected.items():
        assert float(whole.norm()) > 0, f"{key} is zero, and would be so whatever happened"
        far = float((sum(each[key] for each in found) - whole).norm())
        assert far < 1e-12 * max(float(whole.norm()), 1e-3 * largest), f"{key} is off by {far:.1e}"


def test_results_of_the_first_token_are_the_same_on_every_rank() -> None:
    """Logits of a class, and means of losses; gradients of the mean are summands, too."""
    for name in ("ViT of 10 tokens", "classifier"):

        def mean(context: ContextRanks | None, name: str = name) -> list[Tensor]:
            model = MODELS[name](context, "contiguous", torch.float64)
            loss = _loss(model, step=1, reduction="mean")
            loss.backward()
            return [loss.detach(), *(p.grad for p in model.parameters())]

        expected = mean(None)
        found = run_virtual(2, lambda t, mean=mean: mean(ContextRanks.of(t)))
        for own in found:
            torch.testing.assert_close(own[0], expected[0], rtol=1e-13, atol=0)
        for parts, whole in zip(zip(*found, strict=True), expected, strict=True):
            if whole.dim():
                torch.testing.assert_close(sum(parts), whole, rtol=1e-9, atol=1e-13)

    def logits(context: ContextRanks | None) -> Tensor:
        model = MODELS["ViT of 10 tokens"](context, "zigzag", torch.float64).eval()
        return model(torch.ones(B, 3, 6, 6, dtype=torch.float64))

    whole = logits(None)
    for own in run_virtual(3, lambda t: logits(ContextRanks.of(t, method="ring"))):
        torch.testing.assert_close(own, whole, rtol=1e-12, atol=1e-14)


def _trained(model: nn.Module, mesh: Mesh | None, *, shards: bool = False) -> list[float]:
    """Losses of STEPS steps, in fp32; shards: by ZeRO, over ranks that cut layers as well."""
    through, optimizer = model, AdamW(model.parameters(), lr=5e-3)
    if shards:
        config = ZeroConfig(stage=1, reduction="sum")
        optimizer = ZeroOptimizer(model, AdamW, config, mesh=mesh, lr=5e-3)
    elif mesh is not None:
        through = DataParallel(model, mesh=mesh, reduction="sum")
        optimizer = AdamW(model.parameters(), lr=5e-3)
    found = []
    for step in range(STEPS):
        loss = _loss(model, step=step, through=through, reduction="mean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def _on_ranks(
    rank: int, group: Any, names: list[str], cp: int, tp: int, method: str
) -> dict[str, Any]:
    mesh = Mesh(Axes(cp=cp, tp=tp))
    context = ContextRanks.of(mesh, method=method)
    layout: dict[str, Any] = {"group": mesh, "sequence_parallel": True} if tp > 1 else {}
    return {
        name: _trained(
            MODELS[name](context, "zigzag", torch.float32, **layout), mesh, shards=tp > 1
        )
        for name in names
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("cp", "tp", "method"),
    [
        (2, 1, "gather"),
        full(2, 1, "ulysses"),
        full(2, 1, "ring"),
        full(4, 1, "ring"),
        full(4, 1, "gather"),
        full(2, 2, "ring"),
    ],
)
def test_ten_losses_with_dropout_are_those_of_one_process(
    world: Any, cp: int, tp: int, method: str
) -> None:
    names = ["T5", "ViT of 10 tokens", "BERT", "classifier"]
    found = world(cp * tp).run(_on_ranks, names, cp, tp, method)
    for name in names:
        expected = _trained(MODELS[name](None, "zigzag", torch.float32), None)
        assert expected[-1] < 0.98 * expected[0], f"{name} learns nothing: {expected}"
        for own in found:
            assert own[name] == pytest.approx(expected, rel=1e-5), name
