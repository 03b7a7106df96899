"""Dropout of transformers' models by counters: the same masks for micro-batches, on ranks that have
some of the heads, and in recomputation; nothing is drawn from torch's generator."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pyops import recompute
from pyops.flat import Placement
from pyops.mesh import ALONE
from pyops.models import GPT, GPTConfig
from pyops.parallel.dropout.keyed_dropout import KeyedDropout, key_dropout, set_keyed_dropout
from pyops.parallel.dropout.keyed_forward import KeyedFunctions
from pyops.parallel.dropout.keyed_stream import KeyedStream
from pyops.random import dropout_mask, states_of, with_states
from pyops.tensor_parallel import parallelize, set_dropout, sync_partial_grads
from tests.grids import full
from tests.parallel.tiny_transformers import batch_for, make_model
from tests.square_tensors import SquareTensors
from tests.tensor_parallel.convert.test_parallelize import as_cut

P = 0.2
LLAMA = {"num_hidden_layers": 2, "attention_dropout": P}
GPT2 = {"n_layer": 2, "resid_pdrop": P, "embd_pdrop": P, "attn_pdrop": P}
BERT = {"num_hidden_layers": 2, "hidden_dropout_prob": P, "attention_probs_dropout_prob": P}
BART = {"encoder_layerdrop": 0.0, "dropout": P, "attention_dropout": P, "activation_dropout": P}
# Under each name the model of tiny_transformers, and fields of its config. Half of the 64 columns
# within an MLP are as wide as the hidden states: the shape does not tell one from the other.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama, eager": ("llama", {**LLAMA, "attn_implementation": "eager"}),
    "llama, 1 group": ("llama", {**LLAMA, "num_key_value_heads": 1}),
    "gpt2": ("gpt2", {**GPT2, "n_inner": 64}),
    "gpt2, 5 heads": ("gpt2", {**GPT2, "n_head": 5, "n_embd": 30}),
    "bert": ("bert", {**BERT, "intermediate_size": 64}),
    "t5": ("t5", {"d_ff": 64, "dropout_rate": P}),
    "bart": ("bart", {**BART, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}),
    "opt": ("opt", {"num_hidden_layers": 2, "dropout": P, "attention_dropout": P}),
    "bloom": ("bloom", {"n_layer": 2, "hidden_dropout": P, "attention_dropout": P}),
    "vit": ("vit", BERT),
}
NAMES = list(CASES)
BLOCKS = {
    "llama": ["model.layers.*"],
    "llama, eager": ["model.layers.*.self_attn"],
    "gpt2": ["transformer.h.*"],
    "t5": ["encoder.block.*", "decoder.block.*"],
    "bart": ["model.encoder.layers.*", "model.decoder.layers.*"],
}
SLOW = 240.0  # seconds; importing transformers on a busy machine


@functools.cache
def plain(name: str) -> nn.Module:
    kind, fields = CASES[name]
    return make_model(kind, **fields).train()


def keyed(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = copy.deepcopy(plain(name)).to(dtype)
    assert key_dropout(model) > 0
    return model


def rows_of(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Four rows; the third ends early."""
    batch = batch_for(CASES[name][0], rows=4)
    if "input_ids" in batch:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][2, -3:] = 0
    if CASES[name][0] in ("t5", "bart"):
        batch["decoder_input_ids"] = batch["labels"].clamp(min=3)
    batch.pop("labels")
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}


def forward(
    model: nn.Module,
    batch: dict[str, Any],
    *,
    rows: slice = slice(0, 4),
    seed: int = 3,
    step: int = 5,
    first_row: int | None = None,
) -> Tensor:
    first = rows.start if first_row is None else first_row
    set_keyed_dropout(model.named_modules(), seed=seed, step=step, first_row=first)
    part = {key: x[rows] if isinstance(x, Tensor) else x for key, x in batch.items()}
    logits: Tensor = model(**part).logits
    return logits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert len(found) > 10
    assert sum(bool(g.any()) for g in found.values()) > 0.8 * len(found)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_two_micro_batches_are_one_batch(name: str):
    model, batch = keyed(name), rows_of(name)
    before = torch.get_rng_state()
    whole = forward(model, batch)
    whole.square().sum().backward()
    expected = gradients(model)
    parts = []
    for rows in (slice(2, 4), slice(0, 2)):
        parts.insert(0, forward(model, batch, rows=rows))
        parts[0].square().sum().backward()
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-11, atol=1e-11)
    scale = max(float(g.abs().max()) for g in expected.values())
    for key, gradient in gradients(model).items():
        assert (gradient - expected[key]).abs().max() <= 1e-12 * scale, key
    assert torch.equal(torch.get_rng_state(), before), "something draws from torch's generator"


@pytest.mark.parametrize("name", NAMES)
def test_another_step_seed_or_row_is_another_mask_and_eval_is_as_before(name: str):
    model, batch = keyed(name), rows_of(name)
    first = forward(model, batch)
    assert torch.equal(forward(model, batch), first)
    for other in ({"step": 6}, {"seed": 4}, {"first_row": 4}):
        assert (forward(model, batch, **other) - first).abs().flatten(1).amax(1).min() > 1e-3, other
    untouched = copy.deepcopy(plain(name)).double().eval()
    expected = untouched(**batch).logits
    model.eval()
    assert torch.equal(model(**batch).logits, expected)
    assert not torch.equal(first, expected)


def test_about_p_of_the_elements_fall_and_the_others_are_scaled():
    layer, x = KeyedDropout(0.3), torch.ones(64, 32, 16, dtype=torch.float64)
    set_keyed_dropout([("name", layer)], seed=3, step=5, first_row=2)
    y = layer(x)
    mask = dropout_mask(3, "name@5", y.shape, p=0.3, offset=(2, 0, 0), global_shape=(66, 32, 16))
    assert torch.equal(y, mask.double() * (1 / (1 - 0.3)))
    assert 0.3 * 0.97 < (~mask).double().mean() < 0.3 * 1.03


T, S = 9, 12
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.rand(3, 1, T, S, generator=torch.Generator().manual_seed(1)) < 0.7},
    "padding": {"attn_mask": torch.arange(S) < torch.tensor([12, 7, 9])[:, None, None, None]},
    "padding of all": {"attn_mask": (torch.arange(S) < 7).expand(T, S)},
    "sees nothing": {"attn_mask": torch.arange(T)[:, None] > torch.arange(S)},
    "added": {"attn_mask": torch.linspace(-2, 2, 4 * T * S, dtype=torch.float64).view(4, T, S)},
}


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("kind", list(MASKS))
def test_attention_drops_weights_of_torchs_own(kind: str, groups: int):
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, 4, T, 5, dtype=torch.float64, generator=generator)
    k = torch.randn(3, groups, S, 5, dtype=torch.float64, generator=generator)
    identity = torch.eye(S, dtype=torch.float64).expand(3, groups, S, S)  # so that weights come out
    options = {**MASKS[kind], "enable_gqa": groups < 4}
    weights = functional.scaled_dot_product_attention(q, k, identity, **options)
    stream = KeyedStream()
    set_keyed_dropout([("attention", stream)], seed=3, step=5, first_row=1)
    with KeyedFunctions(stream):
        dropped = functional.scaled_dot_product_attention(
            q, k, identity, dropout_p=P, scale=5**-0.5, **options
        )
        same = functional.scaled_dot_product_attention(q, k, identity, **options)
    mask = dropout_mask(
        3, "attention@5", weights.shape, p=P, offset=(1, 0, 0, 0), global_shape=(4, 4, T, S)
    )
    torch.testing.assert_close(dropped, weights * mask / (1 - P), rtol=1e-12, atol=1e-13)
    assert 0.1 < (~mask).double().mean() < 0.3
    assert torch.equal(same, weights)


def tensor_parallel_differences(
    rank: int, group: dist.ProcessGroup, names: list[str], shares_tokens: bool
) -> dict[str, tuple[float, float, float]]:
    """{name: largest difference of logits, and of gradients, from one process, and of one process
    from itself at the next step}."""
    return {name: differences_of(group, name, shares_tokens) for name in names}


def differences_of(
    group: dist.ProcessGroup, name: str, shares_tokens: bool
) -> tuple[float, float, float]:
    alone, batch = keyed(name), rows_of(name)
    model = copy.deepcopy(plain(name)).double()
    parallelize(model, group=group, sequence_parallel=shares_tokens, check=False)
    with pytest.raises(ValueError, match="is cut over 2 ranks, but the group has 1"):
        key_dropout(model)
    key_dropout(model, group=group)
    # With other rows before, so that the rows of a rank do not begin at 0.
    outputs = [forward(each, batch, rows=slice(1, 4)) for each in (alone, model)]
    for each in outputs:
        each.square().sum().backward()
    sync_partial_grads(model, group=group)
    expected, placements = gradients(alone), Placement.of(model)
    scale = max(float(g.abs().max()) for g in expected.values())
    worst = 0.0
    for n, p in model.named_parameters():
        place = placements.get(n) or Placement.whole(p.shape, rank=0, ranks=1)
        reference = place.take(as_cut(alone, n, expected[n], place))
        worst = max(worst, float((p.grad - reference).abs().max()) / scale)
    logits = [each.detach() for each in outputs]
    other = forward(alone, batch, rows=slice(1, 4), step=6).detach()
    return (
        float((logits[1] - logits[0]).abs().max()),
        worst,
        float((other - logits[0]).abs().max()),
    )


# The 27 tokens of three rows are shared out over two ranks, one of which has padding.
SHARED = ["gpt2, 5 heads", "t5", "bart", "opt"]


@pytest.mark.parametrize(
    ("names", "shares_tokens"),
    [
        ([n for n in NAMES if n not in SHARED], False),
        full(SHARED, False),
        (SHARED, True),
        full([n for n in NAMES if n not in SHARED], True),
    ],
    ids=["heads", "heads, models below", "heads and tokens", "heads and tokens, other models"],
)
def test_ranks_that_share_layers_drop_what_one_process_does(world, names, shares_tokens):
    found = world(2).run(tensor_parallel_differences, names, shares_tokens, timeout=SLOW)
    for of_rank in found:
        for name, (logits, grads, other) in of_rank.items():
            assert logits <= 1e-10, (name, logits)
            assert grads <= 1e-11, (name, grads)
            assert other > 1e-3, name


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_state_dicts_are_as_before(name: str):
    model, batch = keyed(name), rows_of(name)
    assert list(model.state_dict()) == list(plain(name).state_dict())
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in plain(name).named_buffers()]
    assert key_dropout(model) == 0, "a second time there is nothing left"
    first = forward(model, batch)
    states = states_of(model)
    other = copy.deepcopy(model)
    assert torch.equal(forward(other, batch), first)
    assert [each.state for each, _ in states] == [state for _, state in states]


@pytest.mark.parametrize("name", list(BLOCKS))
def test_recomputation_draws_the_same(name: str):
    batch, found = rows_of(name, torch.float32), []
    for recomputed in (False, True):
        model = keyed(name, torch.float32)
        if recomputed:
            assert len(recompute.apply(model, BLOCKS[name])) in (2, 4)
        logits = forward(model, {**batch, "use_cache": False})
        set_keyed_dropout(model.named_modules(), seed=0, step=0, first_row=0)  # of the next forward
        logits.square().sum().backward()
        found.append(gradients(model))
    for key, gradient in found[0].items():
        assert torch.equal(gradient, found[1][key]), key


def test_a_module_that_is_called_twice_draws_twice():
    model, batch = keyed("t5"), rows_of("t5")
    dropped: list[Tensor] = []
    model.encoder.dropout.register_forward_hook(lambda *args: dropped.append(args[-1] == 0))
    first = forward(model, batch)
    assert len(dropped) == 2
    assert 0.6 < (dropped[0] == dropped[1]).double().mean() < 0.76  # 0.8^2 + 0.2^2 = 0.68
    set_keyed_dropout(model.named_modules(), seed=3, step=5, first_row=0)
    states = states_of(model)
    assert torch.equal(model(**batch).logits, first)
    assert not torch.equal(model(**batch).logits, first)
    with with_states(states):
        assert torch.equal(model(**batch).logits, first)
    assert torch.equal(dropped[0], dropped[-2])
    assert torch.equal(dropped[1], dropped[-1])


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "opt"])
def test_bf16(name: str):
    model, batch = keyed(name, torch.bfloat16), rows_of(name, torch.bfloat16)
    logits = forward(model, batch)
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    assert all(g.isfinite().all() for g in gradients(model).values())
    parts = [forward(model, batch, rows=rows) for rows in (slice(0, 2), slice(2, 4))]
    scale = float(logits.detach().float().abs().max())
    torch.testing.assert_close(torch.cat(parts), logits, rtol=0.05, atol=0.05 * scale)


def test_compiled_it_is_the_same_without_a_break():
    model, batch = keyed("llama", torch.float32), rows_of("llama", torch.float32)
    expected = [forward(model, batch, step=step) for step in (5, 6)]
    model.model.layers[0].compile(backend="eager", fullgraph=True)
    for step, each in zip((5, 6), expected, strict=True):
        torch.testing.assert_close(forward(model, batch, step=step), each)


def test_pyops_own_layers_need_the_shape_of_the_tokens():
    config = GPTConfig(vocab_size=64, dim=16, num_layers=1, num_heads=2, dropout=P)
    model = GPT(config, group=ALONE)
    with pytest.raises(ValueError, match=r"pyops's own layers.*give shape=\(B, T\)"):
        set_keyed_dropout(model.named_modules(), seed=3, step=5, first_row=2)
    set_keyed_dropout(model.named_modules(), seed=3, step=5, first_row=2, shape=(2, 8))
    states = [state.clone() for _, state in states_of(model)]
    assert states
    set_dropout(model, seed=3, step=5, first_row=2, shape=(2, 8))
    assert all(torch.equal(a, b) for a, (_, b) in zip(states, states_of(model), strict=True))


def test_what_is_refused():
    model = copy.deepcopy(plain("llama"))
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="model recomputes by transformers' gradient checkpoint"):
        key_dropout(model)
    with pytest.raises(RuntimeError, match="has no state: call set_keyed_dropout"):
        keyed("llama")(**rows_of("llama"))


def test_nothing_is_done_where_nothing_drops():
    model = make_model("llama", num_hidden_layers=1)
    assert key_dropout(model) == 0
    assert "forward" not in vars(model.model.layers[0].self_attn)


@pytest.mark.cpu_only
@pytest.mark.parametrize("masked", [False, True])
def test_attention_makes_no_weights(masked: bool):
    """With dropout, forward and backward, by torch's function and by torch.nn.MultiheadAttention,
    whose keys are padded; the operation is given no tensor of queries x keys either."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            padding = torch.zeros(x.shape[:2], dtype=torch.bool) if masked else None
            y, _ = self.inner(x, x, x, key_padding_mask=padding, need_weights=False)
            heads = y.unflatten(-1, (2, 4)).transpose(1, 2)
            mask = None if padding is None else (~padding[:, None, None]).expand(-1, 1, 61, 61)
            return functional.scaled_dot_product_attention(
                heads, heads, heads, attn_mask=mask, dropout_p=0.3
            )

    model = Model().train()
    assert key_dropout(model) == 2
    set_keyed_dropout(model.named_modules(), seed=1, step=0, first_row=0)
    with SquareTensors(61) as square:
        model(torch.randn(2, 61, 8, requires_grad=True)).sum().backward()
    assert not square.found
