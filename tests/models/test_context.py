"""A GPT whose rows of tokens are shared out over ranks is the GPT of one rank: losses, gradients,
dropped elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops import recompute
from pyops.comm.collectives.transport import run_virtual
from pyops.context_parallel import ContextRanks, pad_tokens
from pyops.mesh import Axes, Mesh
from pyops.models import BERT, GPT, BERTConfig, GPTConfig
from pyops.models.context import _stretches
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer

pytestmark = pytest.mark.cpu_only

B, T, V = 2, 16, 11
SIZES: dict[str, Any] = {"vocab_size": V, "sequence_length": T, "num_layers": 2, "dim": 16}
CONFIGS = {
    "GPT-2": GPTConfig(**SIZES, num_heads=4, dropout=0.2, attention_dropout=0.2),
    "Llama": GPTConfig(
        **SIZES,
        num_heads=4,
        num_kv_heads=2,
        norm="rmsnorm",
        activation="swiglu",
        positions="rotary",
        bias=False,
        tied_head=False,
        attention_dropout=0.1,
    ),
}


def _rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(V, (B, T + 1), generator=generator)
    targets = text[:, 1:].clone()
    targets[0, : T // 2] = -100  # another number of targets on each rank
    return text[:, :-1], targets


def _gradients(config: GPTConfig, context: ContextRanks | None, order: str) -> dict[str, Tensor]:
    model = GPT(config, context=context, order=order, dtype=torch.float64)
    model.set_dropout((B, T), seed=3, step=4, first_row=6)
    tokens, targets = _rows()
    total = model.loss(tokens, targets, reduction="sum")
    total.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": total.detach(), **found}


@pytest.mark.parametrize(
    ("size", "method", "heads", "order"),
    [
        (2, "gather", None, "zigzag"),
        (2, "ulysses", None, "striped"),
        (2, "ring", None, "contiguous"),
        (4, "gather", None, "contiguous"),
        (4, "ulysses", None, "zigzag"),
        (4, "ring", None, "striped"),
        (4, "ring", 2, "zigzag"),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_those_of_one_rank(
    name: str, size: int, method: str, heads: int | None, order: str
) -> None:
    config = CONFIGS[name]
    expected = _gradients(config, None, order)

    def body(transport: Any) -> dict[str, Tensor]:
        context = ContextRanks.of(transport, method=method, heads=heads)
        return _gradients(config, context, order)

    found = run_virtual(size, body)
    for key, whole in expected.items():
        total = sum(each[key] for each in found)
        assert float(whole.norm()) > 0
        far = float((total - whole).norm() / whole.norm())
        assert far < 1e-10, f"{key} is off by {far:.1e}"


ENCODERS = {
    "BERT": BERTConfig(**SIZES, num_heads=4, dropout=0.2, attention_dropout=0.2, pooled_head=False),
    "RoFormer": BERTConfig(
        **SIZES, num_heads=2, positions="rotary", attention_dropout=0.1, pooled_head=False
    ),
}


@pytest.mark.parametrize(
    ("size", "method", "order"),
    [(2, "gather", "contiguous"), (2, "ring", "zigzag"), (2, "ulysses", "striped")],
)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_with_padding_are_those_of_one_rank(
    name: str, size: int, method: str, order: str
) -> None:
    tokens, targets = _rows()
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, T - 3 :] = mask[1, T - 9 :] = False
    types = (torch.arange(T) > 5).long().expand(B, T)

    def gradients(context: ContextRanks | None) -> list[Tensor]:
        model = BERT(ENCODERS[name], context=context, order=order, dtype=torch.float64)
        model.set_dropout((B, T), seed=3, step=4, first_row=6)
        total = model.loss(tokens, targets, types=types, mask=mask, reduction="sum")
        total.backward()
        return [total.detach(), *(p.grad for p in model.parameters())]

    expected = gradients(None)
    found = run_virtual(size, lambda t: gradients(ContextRanks.of(t, method=method)))
    for number, whole in enumerate(expected):
        total = sum(each[number] for each in found)
        assert float((total - whole).norm()) < 1e-10 * max(float(whole.norm()), 1e-3), number
        assert number or float(whole.norm()) > 0


@pytest.mark.parametrize(("name", "method"), [("GPT-2", "ring"), ("Llama", "gather")])
def test_packed_documents_are_those_of_one_rank(name: str, method: str) -> None:
    tokens, targets = _rows()
    lengths = torch.tensor([[5, 8, 3], [1, 9, 6]])
    documents = torch.stack([torch.arange(3).repeat_interleave(row) for row in lengths]).int()

    def gradients(context: ContextRanks | None) -> list[Tensor]:
        model = GPT(CONFIGS[name], context=context, dtype=torch.float64)
        model.set_dropout((B, T), seed=3, step=4)
        total = model.loss(tokens, targets, documents_BT=documents, reduction="sum")
        total.backward()
        return [total.detach(), *(p.grad for p in model.parameters())]

    expected = gradients(None)
    found = run_virtual(2, lambda t: gradients(ContextRanks.of(t, method=method)))
    for number, whole in enumerate(expected):
        total = sum(each[number] for each in found)
        assert float(whole.norm()) > 0
        assert float((total - whole).norm()) < 1e-10 * float(whole.norm()), number


def test_own_tokens_at_equal_distances_are_one_stretch() -> None:
    assert _stretches([0, 1, 6, 7, 16, 17, 22, 23]) == (
        (0, 2, 0, 1),
        (2, 2, 6, 1),
        (4, 2, 16, 1),
        (6, 2, 22, 1),
    )
    assert _stretches([1, 3, 5, 7]) == ((0, 4, 1, 2),)
    assert _stretches([4]) == ((0, 1, 4, 1),)
    assert _stretches([]) == ()


def _trained(rank: int, group: Any, axes: Axes, stage: int, sequence_parallel: bool) -> list[float]:
    """Three steps over a grid with cp, of fp32."""
    mesh = Mesh(axes)
    context = ContextRanks.of(mesh, method="ring")
    model = GPT(CONFIGS["Llama"], group=mesh, context=context, sequence_parallel=sequence_parallel)
    zero = ZeroOptimizer(model, AdamW, ZeroConfig(stage=stage, reduction="sum"), mesh=mesh, lr=1e-2)
    tokens, targets = _rows()
    losses = []
    for step in range(3):
        mine = slice(mesh.rank("dp"), None, mesh.size("dp"))
        model.set_dropout((len(tokens[mine]), T), seed=3, step=step, first_row=mesh.rank("dp"))
        loss = model.loss(tokens[mine], targets[mine])
        count = (targets[mine] != -100).sum() / (targets != -100).sum()
        (loss * count).backward()
        zero.step()
        zero.zero_grad()
        losses.append(float(loss.detach() * count))
    return losses


@pytest.mark.full
def test_grids_train_as_one_rank_does(world) -> None:
    model = GPT(CONFIGS["Llama"])
    optimizer = AdamW(model.parameters(), lr=1e-2)
    tokens, targets = _rows()
    expected = []
    for step in range(3):
        model.set_dropout((B, T), seed=3, step=step)
        loss = model.loss(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    assert expected[-1] < 0.95 * expected[0]
    for axes, stage, sp in (
        (Axes(cp=2, tp=2), 0, True),
        (Axes(dp=2, cp=2), 3, False),
        (Axes(cp=4), 1, False),
    ):
        found = world(4).run(_trained, axes, stage, sp)
        for step, whole in enumerate(expected):
            parts = {each[step] for each in found}  # of each copy once
            assert sum(parts) == pytest.approx(whole, rel=1e-5), (axes, step)


def test_refusals_say_why() -> None:
    def body(transport: Any) -> None:
        model = GPT(CONFIGS["Llama"], context=ContextRanks.of(transport))
        tokens, _ = _rows()
        with pytest.raises(ValueError, match="past is for ranks that have all tokens"):
            model(tokens, past=model.new_kv_caches())
        with pytest.raises(ValueError, match="15 tokens can't be shared out zigzag over 2 ranks"):
            model(tokens[:, :15])
        with pytest.raises(ValueError, match="order is 'balanced'; a model takes zigzag"):
            GPT(CONFIGS["Llama"], context=ContextRanks.of(transport), order="balanced")

    run_virtual(2, body)


def _kept(model: GPT, tokens: Tensor) -> int:
    """Bytes of floats that are kept for backward, without parameters, each memory once."""
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters and x.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = model.loss(tokens, tokens, reduction="sum")
    assert result.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("method", ["gather", "ulysses", "ring"])
def test_a_rank_keeps_its_share_of_the_activations(method: str) -> None:
    length = 64
    config = GPTConfig(vocab_size=V, sequence_length=length, num_layers=2, dim=16, tied_head=False)
    tokens = torch.randint(V, (B, length), generator=torch.Generator().manual_seed(1))

    def bytes_kept(context: ContextRanks | None) -> int:
        return _kept(GPT(config, context=context), tokens)

    whole = bytes_kept(None)
    for size in (2, 4):
        found = run_virtual(size, lambda t: bytes_kept(ContextRanks.of(t, method=method)))
        # With "ulysses" the result of attention lies there twice, by heads and by tokens.
        twice = config.num_layers * B * length * config.dim * 4 if method == "ulysses" else 0
        assert max(found) < 1.01 * (whole + twice) / size, (size, found, whole)


def test_recomputed_blocks_and_padded_rows_change_nothing() -> None:
    config = CONFIGS["Llama"]
    tokens, targets = _rows()
    tokens, targets = tokens[:, :13], targets[:, :13]

    def gradients(context: ContextRanks | None, *, recomputes: bool, pads: bool) -> list[Tensor]:
        model = GPT(config, context=context, dtype=torch.float64)
        if recomputes:
            recompute.apply(model, ["blocks.*"])
        x, y = tokens, targets
        if pads:
            x, y = pad_tokens(x, T, value=0), pad_tokens(y, T, value=-100)
        model.eval() if pads else model.set_dropout((B, T), seed=1, step=2)
        loss = model.loss(x, y, reduction="sum")
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    def check(pads: bool, **options: Any) -> None:
        expected = gradients(None, recomputes=False, pads=False) if not pads else plain
        found = run_virtual(
            2, lambda t: gradients(ContextRanks.of(t, method="ring"), pads=pads, **options)
        )
        for own, whole in zip(zip(*found, strict=True), expected, strict=True):
            torch.testing.assert_close(sum(own), whole, rtol=1e-10, atol=1e-12)

    model = GPT(config, dtype=torch.float64).eval()
    loss = model.loss(tokens, targets, reduction="sum")
    loss.backward()
    plain = [loss.detach(), *(p.grad for p in model.parameters())]
    check(True, recomputes=False)
    check(True, recomputes=True)
    tokens, targets = _rows()
    check(False, recomputes=True)
