"""apply: a pattern in models of transformers, against their own attention with the pattern as a
mask of tokens."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import pyops.parallel
from pyops.attention import (
    BigBird,
    Fixed,
    Longformer,
    Pattern,
    PatternLayouts,
    SlidingWindow,
    apply,
    from_mask_function,
)
from pyops.mesh import ALONE
from pyops.ops.attention import AttentionMask, attention, attention_with_lse, merge
from pyops.optim import AdamW
from pyops.parallel import ParallelPlan
from pyops.parallel.dropout.keyed_dropout import key_dropout, set_keyed_dropout
from pyops.tensor_parallel import parallelize
from tests.square_tensors import SquareTensors

pytestmark = pytest.mark.cpu_only

VOCAB, LENGTH, BLOCK, HEADS = 31, 70, 16, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "max_position_embeddings": 96,
}
PATTERN = BigBird(num_random_blocks=1, different_layout_per_head=True, seed=3)


def llama(**changes: Any) -> Any:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **changes)
    return transformers.LlamaForCausalLM(config)


def gpt2(**changes: Any) -> Any:
    options = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, **changes}
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=96, n_embd=32, n_layer=2, n_head=HEADS, **options
    )
    return transformers.GPT2LMHeadModel(config)


def bert(**changes: Any) -> Any:
    options = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, **changes}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **options))


def made(function: Any, **changes: Any) -> Any:
    torch.manual_seed(1)
    model = function(attn_implementation="sdpa", **changes).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def tokens(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(2))


def as_mask(seen: Tensor, padding: Tensor) -> Tensor:
    """[B, H, T, S], as torch's attention adds it."""
    both = seen[None] & padding[:, None, None].bool()
    return torch.zeros(both.shape, dtype=torch.float64).masked_fill(
        ~both, torch.finfo(torch.float64).min
    )


def seen_by(pattern: Pattern, *, causal: bool, length: int = LENGTH) -> Tensor:
    layouts = PatternLayouts(pattern, heads=HEADS, block=BLOCK, causal=causal)
    return layouts.of(length).tokens().expand(HEADS, -1, -1)


@pytest.mark.parametrize(("function", "causal"), [(llama, True), (gpt2, True), (bert, False)])
def test_the_model_with_the_pattern_as_a_mask(function: Any, causal: bool):
    """Logits and gradients, with padding at the end of one row."""
    model, given = made(function), tokens()
    padding = torch.ones_like(given)
    padding[1, -9:] = 0
    dense = model(input_ids=given, attention_mask=padding).logits
    mask = as_mask(seen_by(PATTERN, causal=causal), padding)
    parameters = list(model.parameters())
    counted = padding[..., None].bool()

    def differentiated(mask: Tensor) -> list[Tensor]:
        logits = model(input_ids=given, attention_mask=mask).logits
        logits = logits.masked_fill(~counted, 0.0)
        grads = torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)
        return [logits, *(g for g in grads if g is not None)]

    wanted = differentiated(mask)
    name = apply(model, PATTERN, block=BLOCK)
    assert model.config._attn_implementation == name
    with SquareTensors(LENGTH) as square:
        found = differentiated(padding)
    assert not [each for each in square.found if each.endswith(f"{LENGTH}, {LENGTH}]")]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(dense, found[0]), "the pattern hides nothing"
    assert "pyops" not in model.config.to_json_string()
    assert apply(model, PATTERN, block=BLOCK) == name
    assert apply(model, PATTERN, block=32) != name
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(input_ids=given, attention_mask=padding).logits, dense)


@pytest.mark.parametrize("function", [llama, gpt2])
def test_a_cache_changes_no_logits(function: Any):
    """A prompt, of which a row begins with padding, one token at a time, then several at once, of
    which the first begins within a block."""
    model, given = made(function).eval(), tokens(2, 60)
    padding = torch.ones_like(given)
    padding[1, :5] = 0
    apply(model, PATTERN | Fixed(2), block=BLOCK)
    with torch.no_grad():
        whole = model(input_ids=given, attention_mask=padding).logits
        assert whole.isfinite().all()
        cache, found, begin = transformers.DynamicCache(), [], 0
        for count in (18, 1, 1, 1, 14, 1, 24):
            part = given[:, begin : begin + count]
            begin += count
            options = {"past_key_values": cache, "attention_mask": padding[:, :begin]}
            found.append(model(input_ids=part, use_cache=True, **options).logits)
        assert begin == 60
        torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-9, atol=1e-9)
        produced = model.generate(given[:, :20], max_new_tokens=4, do_sample=False)
        assert produced.shape == (2, 24)
        with pytest.raises(ValueError, match="use DynamicCache, not a static"):
            model.generate(
                given[:, :20], max_new_tokens=2, do_sample=False, cache_implementation="static"
            )


def test_packed_sequences_keep_apart():
    """Positions that begin again are documents; positions that jump are, too, as transformers reads
    them; with a mask of padding positions change nothing of what is seen."""
    model, given = made(llama).eval(), tokens(1, 60)
    places = torch.cat([torch.arange(17), torch.arange(43)])[None]
    mask = seen_by(PATTERN, causal=True, length=60).clone()
    mask[:, 17:, :17] = False
    with torch.no_grad():
        wanted = model(
            input_ids=given, position_ids=places, attention_mask=as_mask(mask, torch.ones(1, 60))
        ).logits
        apply(model, PATTERN, block=BLOCK)
        found = model(input_ids=given, position_ids=places, use_cache=False).logits
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        jumps = torch.arange(60)[None] + 5 * (torch.arange(60) >= 17)
        found = model(input_ids=given, position_ids=jumps, use_cache=False).logits
        first = model(input_ids=given[:, :17], use_cache=False).logits
        torch.testing.assert_close(found[:, :17], first)
        other = given.clone()
        other[0, 3] = (other[0, 3] + 1) % VOCAB
        changed = model(input_ids=other, position_ids=jumps, use_cache=False).logits
        assert torch.equal(changed[:, 17:], found[:, 17:])


def test_dropout_comes_from_torchs_generator():
    model, given = made(gpt2, attn_pdrop=0.5).train(), tokens()
    apply(model, SlidingWindow(), block=BLOCK)

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(input_ids=given).logits

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.allclose(drawn(1), drawn(2))
    model.eval()
    assert torch.equal(drawn(1), drawn(2))


DROPPING = {
    "llama": (llama, {"attention_dropout": 0.3}),
    "gpt2": (gpt2, {"attn_pdrop": 0.3}),
    "bert": (bert, {"attention_probs_dropout_prob": 0.3}),
}


def on_rank(rank: int, group: Any, step: int = 0) -> dict[str, Tensor]:
    """Logits of each model, whose heads differ, and whose dropout is keyed."""
    found = {}
    for name, (function, options) in DROPPING.items():
        model = made(function, **options).train()
        if group is not None:
            parallelize(model, group=group)
        key_dropout(model, group=ALONE if group is None else group)
        apply(model, PATTERN, block=BLOCK)
        set_keyed_dropout(model.named_modules(), seed=1, step=step, first_row=5)
        with torch.no_grad():
            found[name] = model(input_ids=tokens()).logits
    return found


def test_ranks_see_the_pattern_of_their_heads_and_drop_the_same(world):
    alone, other = on_rank(0, None), on_rank(0, None, 1)
    for found in world(2).run(on_rank):
        for name in DROPPING:
            torch.testing.assert_close(found[name], alone[name], rtol=1e-9, atol=1e-9)
            assert not torch.allclose(alone[name], other[name]), "nothing is dropped"


def test_what_is_refused_before_anything_changes():
    sliding = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=32)
    tiny = {"vocab_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    longformer = transformers.LongformerConfig(**SIZES, attention_window=16)
    far = Longformer(global_block_indices=(6,))
    for model, pattern, block, kind, words in (
        (nn.Linear(2, 2), PATTERN, 16, TypeError, "model is a Linear; apply takes"),
        (gpt2(), "bigbird", 16, TypeError, "give a pattern of pyops.attention"),
        (gpt2(), PATTERN, 24, ValueError, "block is 24; it must be a multiple of 16"),
        (gpt2(), far, 16, ValueError, "global block 6 of a length with 6 blocks"),
        (transformers.MistralModel(sliding), PATTERN, 16, ValueError, "a sliding window of its"),
        (
            transformers.T5ForConditionalGeneration(transformers.T5Config(**tiny)),
            PATTERN,
            16,
            ValueError,
            "T5ForConditionalGeneration",
        ),
        (
            transformers.LongformerModel(longformer),
            PATTERN,
            16,
            ValueError,
            "LongformerModel does not call transformers' AttentionInterface",
        ),
    ):
        before = getattr(getattr(model, "config", None), "_attn_implementation", None)
        with pytest.raises(kind, match=words):
            apply(model, pattern, block=block)
        assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before


def test_calls_that_are_refused():
    model, given = made(llama).eval(), tokens()
    apply(model, PATTERN, block=BLOCK)
    with pytest.raises(
        ValueError, match=r"a mask \[2, 1, 70, 70\] .*takes attention_mask \[B, S\]"
    ):
        model(input_ids=given, attention_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool))
    with pytest.raises(ValueError, match="LlamaAttention asks for attention sinks"):
        attend = transformers.AttentionInterface._global_mapping[model.config._attn_implementation]
        q = torch.ones(1, HEADS, 4, 8)
        attend(
            model.model.layers[0].self_attn, q, q[:, :2], q[:, :2], None, s_aux=torch.ones(HEADS)
        )


def test_bigbird_of_transformers_is_an_oracle():
    """In training, where its random blocks differ; its first and last blocks are global."""
    from transformers.models.big_bird import modeling_big_bird as big_bird

    block, blocks, heads, width = 16, 12, 2, 8
    length = block * blocks
    config = transformers.BigBirdConfig(
        hidden_size=heads * width,
        num_attention_heads=heads,
        attention_type="block_sparse",
        block_size=block,
        num_random_blocks=2,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=length,
    )
    torch.manual_seed(0)
    module = big_bird.BigBirdBlockSparseAttention(config, seed=4).double().train()
    x = torch.randn(1, length, heads * width, dtype=torch.float64)
    ones = torch.ones(1, length, dtype=torch.float64)
    masks = big_bird.BigBirdModel.create_masks_for_block_sparse_attn(ones, block)
    drawn, plan = module._bigbird_block_rand_mask_with_head, []

    def noted(**options: Any) -> Any:
        plan.append(drawn(**options))
        return plan[-1]

    module._bigbird_block_rand_mask_with_head = noted
    blocked, band, rows, columns = masks
    wanted = module(
        x,
        band_mask=band,
        from_mask=rows,
        to_mask=columns,
        from_blocked_mask=blocked,
        to_blocked_mask=blocked,
    )[0]
    table = torch.zeros(heads, blocks, blocks, dtype=torch.bool)
    for head, numbers in enumerate(plan[0]):
        table[head, 1:-1].scatter_(1, torch.as_tensor(np.asarray(numbers)).long(), True)
    assert not torch.equal(table[0], table[1])
    own = from_mask_function(lambda h, q, k: table[h, q, k], different_layout_per_head=True)
    pattern = own | Longformer(global_block_indices=(0, blocks - 1))
    layout = pattern.layout(length, heads=heads, block=block)
    assert layout.density < 0.7
    q, k, v = (
        getattr(module, name)(x).view(1, length, heads, width) for name in ("query", "key", "value")
    )
    found = attention(q, k, v, mask=AttentionMask(layout=layout)).flatten(2)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("global_tokens", [False, True])
def test_longformer_of_transformers_is_an_oracle(global_tokens: bool):
    """A window of tokens, half of it on each side; and tokens that see all and are seen by all. A
    query sees those by the same projections as its window, so both are merged into one softmax; as
    queries they have projections of their own, and see all keys by these."""
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    heads, width, length, window = 2, 8, 96, 16
    config = transformers.LongformerConfig(
        hidden_size=heads * width,
        num_attention_heads=heads,
        attention_window=[window],
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    module = LongformerSelfAttention(config, layer_id=0).double()
    x = torch.randn(2, length, heads * width, dtype=torch.float64)
    kind = torch.zeros(2, length, dtype=torch.float64)
    kind[1, -11:] = -10000.0  # padding
    if global_tokens:
        kind[0, [3, 40]] = kind[1, [0, 41, 57]] = 10000.0
    wanted = module(
        x,
        attention_mask=kind,
        is_index_masked=kind < 0,
        is_index_global_attn=kind > 0,
        is_global_attn=global_tokens,
    )[0]

    def projected(*names: str) -> list[Tensor]:
        return [getattr(module, name)(x).view(2, length, heads, width) for name in names]

    qkv, seen = projected("query", "key", "value"), kind >= 0
    near = AttentionMask(window=(window // 2, window // 2), keys=kind == 0)
    local = attention_with_lse(*qkv, mask=near)
    found, _ = merge(*local, *attention_with_lse(*qkv, mask=AttentionMask(keys=kind > 0)))
    own = projected("query_global", "key_global", "value_global")
    everywhere = attention(*own, mask=AttentionMask(keys=seen))
    found = torch.where((kind > 0)[..., None, None], everywhere, found).flatten(2)
    assert torch.equal(found, local[0].flatten(2)) != global_tokens
    # Queries that are padding are zero there
    torch.testing.assert_close(found[seen], wanted[seen], rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_a_whole_model_is_compiled_without_a_break():
    """Before any step, with packed sequences, whose numbers a mask function holds."""
    model = made(llama)
    model.model.layers = model.model.layers[:1]
    apply(model, PATTERN, block=BLOCK)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    places = torch.cat([torch.arange(n) for n in (20, 37, 13)])
    given = {"input_ids": tokens(), "use_cache": False}
    packed = {"position_ids": places.expand(2, -1), **given}
    found = compiled(**packed).logits
    wanted = model(**packed).logits
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(model(**given).logits, wanted), "the sequences see each other"


def steps(rank: int, group: Any, plan: ParallelPlan) -> list[float]:
    """Losses of two steps with dropout."""
    torch.manual_seed(1)
    model = llama(attention_dropout=0.3)
    apply(model, PATTERN, block=BLOCK)
    trainer = pyops.parallel.parallelize(
        model, plan, optimizer=lambda parameters: AdamW(parameters, lr=1e-2)
    )
    rows = tokens(4).chunk(trainer.mesh.size("dp"))[trainer.mesh.rank("dp")]
    return [trainer.step({"input_ids": rows, "labels": rows}) for _ in range(2)]


def test_any_plan_gives_the_losses_of_one_process(world):
    alone = steps(0, None, ParallelPlan())
    assert alone[1] < alone[0] - 0.01
    for plan in (
        ParallelPlan(pp=2),
        ParallelPlan(tp=2, sequence_parallel=True),
        ParallelPlan(recompute=("model.layers.*",)),
    ):
        for found in world(2).run(steps, plan):
            assert found == pytest.approx(alone, abs=1e-5), plan
