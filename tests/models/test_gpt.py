"""The GPT against its formula written out in float64, and the promises that training rests on."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pyops.models import GPT, GPTConfig, sample
from tests.grids import full

TINY = GPTConfig(vocab_size=11, sequence_length=9, num_layers=2, num_heads=2, dim=12)
VARIANTS = [
    dataclasses.replace(
        TINY, norm=norm, activation=activation, positions=positions, tied_head=tied, bias=bias
    )
    for norm, activation, positions, tied, bias in itertools.product(
        ("layernorm", "rmsnorm"),
        ("gelu", "swiglu"),
        ("learned", "rotary"),
        (True, False),
        (True, False),
    )
]


def short(config: GPTConfig) -> str:
    tied = "tied" if config.tied_head else "untied"
    bias = "bias" if config.bias else "no_bias"
    return f"{config.norm}-{config.activation}-{config.positions}-{tied}-{bias}"


def perturbed(config: GPTConfig, device: torch.device, **kwargs: torch.dtype) -> GPT:
    """A model none of whose parameters is 0 or 1, so that each of them matters."""
    model = GPT(config, seed=3, device=device, **kwargs)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            parameter.add_(noise.to(parameter))
    return model


def formula(p: dict[str, Tensor], tokens: Tensor, config: GPTConfig) -> Tensor:
    """Logits, from the papers: no module, no fused attention, no shared code."""
    T, H, K = tokens.shape[1], config.num_heads, config.dim // config.num_heads

    def affine(x: Tensor, name: str) -> Tensor:
        y = torch.einsum("...i,oi->...o", x, p[f"{name}.weight"])
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def norm(x: Tensor, name: str) -> Tensor:
        if config.norm == "rmsnorm":
            return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"]
        centered = x - x.mean(-1, keepdim=True)
        y = centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"]
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def turn(x: Tensor) -> Tensor:
        """Rotary positions as multiplication by complex numbers of length 1."""
        angle = torch.arange(T, dtype=torch.float64)[:, None] * 10000.0 ** (
            -torch.arange(0, K, 2, dtype=torch.float64) / K
        )
        cos, sin = angle.cos().float(), angle.sin().float()  # tables are kept so
        unit = torch.complex(cos.to(x), sin.to(x))
        z = torch.complex(x[..., : K // 2], x[..., K // 2 :]) * unit
        return torch.cat([z.real, z.imag], -1)

    def attention(x: Tensor, name: str) -> Tensor:
        heads = []
        for h in range(H):
            rows = affine(x, f"{name}.qkv")[..., 3 * K * h : 3 * K * (h + 1)]
            q, k, v = rows[..., :K], rows[..., K : 2 * K], rows[..., 2 * K :]
            if config.positions == "rotary":
                q, k = turn(q), turn(k)
            score = q @ k.transpose(-1, -2) / math.sqrt(K)
            weight = torch.exp(score) * torch.ones(T, T, dtype=score.dtype, device=x.device).tril()
            heads.append(weight / weight.sum(-1, keepdim=True) @ v)
        return affine(torch.cat(heads, -1), f"{name}.output")

    def mlp(x: Tensor, name: str) -> Tensor:
        if config.activation == "swiglu":
            gate, up = (
                torch.einsum("...i,oi->...o", x, p[f"{name}.up.weight"][i])
                + (p[f"{name}.up.bias"][i] if config.bias else 0)
                for i in range(2)
            )
            return affine(gate / (1 + torch.exp(-gate)) * up, f"{name}.down")
        up = affine(x, f"{name}.up")
        return affine(up * 0.5 * (1 + torch.erf(up / math.sqrt(2))), f"{name}.down")

    x = p["embedding.token.weight"][tokens]
    if config.positions == "learned":
        x = x + p["embedding.position.weight"][:T]
    for i in range(config.num_layers):
        x = x + attention(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attention")
        x = x + mlp(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp")
    head = "embedding.token.weight" if config.tied_head else "head.output.weight"
    return norm(x, "head.norm") @ p[head].T


def loss_and_gradients(
    parameters: dict[str, Tensor], logits: Tensor, target: Tensor
) -> tuple[Tensor, ...]:
    loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    return loss, *torch.autograd.grad(loss, list(parameters.values()))


def in_suite(config: GPTConfig) -> bool:
    """A quarter of the variants, among which each pair of two options' values comes twice."""
    rms, gated = config.norm == "rmsnorm", config.activation == "swiglu"
    rotary = config.positions == "rotary"
    return config.tied_head == (rms != gated) and config.bias == (rms != rotary)


@pytest.mark.parametrize(
    "config",
    [each if in_suite(each) else full(each, id=short(each)) for each in VARIANTS],
    ids=short,
)
def test_every_variant_computes_its_formula(config, device):
    draws = torch.randint(config.vocab_size, (4, 2, 3, 7), device=device)

    def ours(dtype: torch.dtype, tokens: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        model = perturbed(config, device).to(dtype)
        return loss_and_gradients(dict(model.named_parameters()), model(tokens), target)

    def plain(dtype: torch.dtype, tokens: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        copies = {
            n: p.detach().to(dtype).requires_grad_()
            for n, p in perturbed(config, device).named_parameters()
        }
        return loss_and_gradients(copies, formula(copies, tokens, config), target)

    names = ["loss", *dict(perturbed(config, device).named_parameters())]
    exact = [plain(torch.float64, *draw) for draw in draws]
    for name, found, wanted in zip(names, ours(torch.float64, *draws[0]), exact[0], strict=True):
        size = wanted.abs().max().item()
        assert size > 1e-6, f"{name} gets no gradient, so this shows nothing"
        torch.testing.assert_close(
            found, wanted, rtol=0, atol=1e-13 * max(size, 1.0), msg=lambda m, n=name: f"{n}: {m}"
        )

    def error(compute: Callable[..., tuple[Tensor, ...]]) -> float:
        """Over all gradients of all draws: in which of them float32 rounds worst is chance, as sums
        run in another order."""
        found = [compute(torch.float32, *draw) for draw in draws]
        pairs = [pair for f, w in zip(found, exact, strict=True) for pair in zip(f, w, strict=True)]
        return math.sqrt(sum((f - w).pow(2).sum().item() for f, w in pairs))

    assert error(ours) <= 2 * error(plain)


@pytest.mark.parametrize("config", VARIANTS[::5], ids=short)
def test_layers_composed_are_the_model(config, device):
    model = perturbed(config, device)
    tokens = torch.randint(config.vocab_size, (2, 5), device=device)
    x = tokens
    for layer in model.layers():
        x = layer(x)
    assert torch.equal(x, model(tokens))
    assert len(model.layers()) == config.num_layers + 2
    held = {id(p) for layer in model.layers() for p in layer.parameters()}
    assert held == {id(p) for p in model.parameters()}


def test_a_token_sees_nothing_of_later_ones(device):
    model = perturbed(TINY, device)
    tokens = torch.randint(TINY.vocab_size, (1, 8), device=device)
    other = tokens.clone()
    other[0, 5:] = (other[0, 5:] + 1) % TINY.vocab_size
    assert torch.equal(model(tokens)[0, :5], model(other)[0, :5])
    assert not torch.equal(model(tokens)[0, 5:], model(other)[0, 5:])


def test_initial_parameters_depend_on_seed_and_name_alone(device):
    torch.manual_seed(1)
    first = GPT(TINY, seed=4, device=device)
    torch.manual_seed(2)
    deeper = GPT(dataclasses.replace(TINY, num_layers=5, vocab_size=30), seed=4)
    again, other = GPT(TINY, seed=4).state_dict(), GPT(TINY, seed=5).state_dict()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor.cpu(), again[name]), name
        if name.startswith("blocks") and not name.endswith(("output.weight", "down.weight")):
            assert torch.equal(tensor.cpu(), deeper.state_dict()[name]), name
        if tensor.ndim == 2:
            assert not torch.equal(tensor.cpu(), other[name]), name
    drawn = [t.cpu() for n, t in first.state_dict().items() if t.ndim == 2 and "head" not in n]
    assert len({t.flatten()[0].item() for t in drawn}) == len(drawn), (
        "two parameters share a stream"
    )


def test_initial_sizes(device):
    state = GPT(dataclasses.replace(TINY, dim=128, num_layers=2), device=device).state_dict()
    assert state["blocks.0.attention.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert state["blocks.1.mlp.down.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert not state["blocks.1.mlp.down.bias"].any()
    assert (state["blocks.0.norm1.weight"] == 1).all()


def test_tied_head_is_one_parameter(device):
    tied, untied = (
        GPT(TINY, device=device),
        GPT(dataclasses.replace(TINY, tied_head=False), device=device),
    )
    assert tied.head.output.weight is tied.embedding.token.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_bf16_keeps_the_angles_of_rotary_positions_exact(device):
    config = dataclasses.replace(TINY, positions="rotary")
    fp32, bf16 = GPT(config, device=device), GPT(config, device=device, dtype=torch.bfloat16)
    assert bf16(torch.zeros(1, 4, dtype=torch.int64, device=device)).dtype == torch.bfloat16
    assert torch.equal(fp32.blocks[0].rotary.table_2TK, bf16.blocks[0].rotary.table_2TK)


def dropped(model: GPT, tokens: Tensor, **where: int) -> Tensor:
    model.set_dropout((tokens.shape[0], tokens.shape[1]), seed=7, **where)
    return model(tokens)


def test_dropout_is_of_the_row_of_the_global_batch_and_the_step(device):
    model = perturbed(dataclasses.replace(TINY, dropout=0.3), device)
    tokens = torch.randint(TINY.vocab_size, (4, 6), device=device)
    whole = dropped(model, tokens, step=2)
    parts = [dropped(model, tokens[i : i + 2], step=2, first_row=i) for i in (0, 2)]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert not torch.allclose(dropped(model, tokens, step=3), whole)
    assert not torch.allclose(dropped(model, tokens[2:], step=2, first_row=0), whole[2:])
    keys = [
        m.state[0].item()
        for m in model.modules()
        if getattr(m, "state", None) is not None and getattr(m, "p", 0)
    ]
    assert len(set(keys)) == len(keys) == 1 + 2 * TINY.num_layers, (
        "each dropout draws from a stream of its own"
    )
    model.eval()
    plain = GPT(TINY, device=device)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), plain(tokens))


def test_dropout_keeps_the_mean(device):
    model = GPT(dataclasses.replace(TINY, dropout=0.25), device=device)
    model.set_dropout((64, 16), seed=0, step=0)
    ones = model.embedding.dropout(torch.ones(64, 16, 12, device=device))
    assert ones.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert ones.mean().item() == pytest.approx(1.0, abs=0.02)


def test_dropout_without_a_key_says_what_to_call(device):
    model = GPT(dataclasses.replace(TINY, dropout=0.3), device=device)
    with pytest.raises(RuntimeError, match=r"call set_dropout"):
        model(torch.zeros(1, 4, dtype=torch.int64, device=device))


@pytest.mark.real_device
@pytest.mark.slow
def test_torch_compile_breaks_no_graph(device):
    model = perturbed(
        dataclasses.replace(TINY, dropout=0.2, positions="rotary", activation="swiglu"), device
    )
    tokens = torch.randint(TINY.vocab_size, (2, 9), device=device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(3):  # new masks every time, and no new graph
        model.set_dropout((2, 9), seed=7, step=step)
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            torch.testing.assert_close(compiled(tokens), model(tokens))


def test_sampling_is_keyed_by_its_seed(device):
    model = perturbed(TINY, device)
    prompt = torch.tensor([1, 2, 3], device=device)
    first = sample(model, prompt, num_tokens=20, context=TINY.sequence_length, seed=1)
    assert first.shape == (23,)
    assert torch.equal(first[:3], prompt)
    assert torch.equal(first, sample(model, prompt, num_tokens=20, context=9, seed=1))
    assert not torch.equal(first, sample(model, prompt, num_tokens=20, context=9, seed=2))
    assert model.training
    greedy = sample(model, prompt, num_tokens=1, context=9, temperature=0)
    assert greedy[-1] == model(prompt[None])[0, -1].argmax()
    with pytest.raises(ValueError, match="at least one token"):
        sample(model, prompt[:0], num_tokens=1, context=9)


def test_sampling_follows_the_softmax(device):
    class Fixed(torch.nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return (
                torch.tensor([0.1, 0.6, 0.3], device=tokens.device)
                .log()
                .expand(1, tokens.shape[1], 3)
            )

    drawn = sample(
        Fixed(),
        torch.zeros(1, dtype=torch.int64, device=device),
        num_tokens=2000,
        context=4,
        temperature=1.0,
    )
    shares = torch.bincount(drawn[1:], minlength=3) / 2000
    torch.testing.assert_close(shares.cpu(), torch.tensor([0.1, 0.6, 0.3]), atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 10, "num_heads": 4}, "dim is 10, which num_heads = 4 does not divide"),
        ({"num_layers": 0}, "num_layers is 0; it must be 1 or more"),
        ({"norm": "batchnorm"}, "norm is 'batchnorm'; choose one of layernorm, rmsnorm"),
        (
            {"activation": "tanh"},
            "activation is 'tanh'; choose one of gelu, gelu_tanh, relu, swiglu",
        ),
        (
            {"num_kv_heads": 3, "num_heads": 4},
            "num_kv_heads is 3, which does not divide num_heads = 4",
        ),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"rotary_stretch": 0.5}, "rotary_stretch is 0.5"),
        ({"attention_dropout": -0.1}, "attention_dropout is -0.1; it is a probability"),
        ({"positions": "rotary", "dim": 6, "num_heads": 2}, "a head is 3 wide"),
        ({"dropout": 1.0}, "dropout is 1.0; it is a probability"),
        ({"hidden": -1}, "hidden is -1"),
    ],
)
def test_a_bad_shape_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_a_sequence_that_is_too_long(device):
    with pytest.raises(ValueError, match="10 tokens is longer than sequence_length = 9"):
        GPT(TINY, device=device)(torch.zeros(1, 10, dtype=torch.int64, device=device))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_past_changes_no_logits(positions, device):
    """Tokens one at a time after a prompt, groups that share keys, against all at once; what is too
    long is refused."""
    config = dataclasses.replace(
        TINY, positions=positions, num_heads=2, num_kv_heads=1, num_layers=2
    )
    model = perturbed(config, device).double().eval()
    tokens = torch.randint(config.vocab_size, (2, config.sequence_length), device=device)
    with torch.no_grad():
        whole = model(tokens)
        past = model.new_kv_caches()
        parts = [model(tokens[:, :3], past=past)]
        parts += [model(tokens[:, i : i + 1], past=past) for i in range(3, config.sequence_length)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-12)
        with pytest.raises(
            ValueError, match=f"a sequence of {config.sequence_length + 1} tokens is longer"
        ):
            model(tokens[:, :1], past=past)
        model(tokens[:, :1], past=(past := model.new_kv_caches()))
        with pytest.raises(ValueError, match="2 tokens follow 1 of the past"):
            model(tokens[:, :2], past=past)


def test_sampling_with_a_past_draws_what_it_draws_without(device):
    """Past the end of the context too, which costs one forward of half of it; else each token is
    computed once."""
    model = perturbed(TINY, device).double()
    shown: list[int] = []
    model.embedding.register_forward_pre_hook(lambda _, args: shown.append(args[0].shape[1]))

    class Without(torch.nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return model(tokens)

    prompt = torch.tensor([1, 2, 3], device=device)
    with_past = sample(model, prompt, num_tokens=20, context=9, seed=1)
    costs = list(shown)
    assert torch.equal(with_past, sample(Without(), prompt, num_tokens=20, context=9, seed=1))
    assert costs == [3, *[1] * 6, 5, *[1] * 4, 5, *[1] * 4, 5, 1, 1]
    assert max(shown) == 9
