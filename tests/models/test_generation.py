"""Texts that are generated with keys and values kept, against the model's own logits of whole
texts, and what a row's text may depend on."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from pyops.mesh import ALONE
from pyops.models import BERT, GPT, T5, BERTConfig, GPTConfig, generate, sample, score
from pyops.models.generation import generating
from pyops.models.generation.choosing import Candidates, candidates_of, choose, draws
from pyops.models.generation.decoders import decoder_of
from pyops.models.generation.options import GenerateOptions
from pyops.tensor_parallel import Ranks, RowSpan
from tests.models.talkers import PROMPTS, TALKERS, VOCAB, talker

pytestmark = pytest.mark.cpu_only

TEXTS = [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8], [9, 7, 9, 3, 2, 3]]
BEGUN = [4, 1, 2]  # of each text, before one token of each follows at a time


def whole_logits(model: torch.nn.Module, number: int, text: list[int]) -> Tensor:
    """[T, V], nothing kept."""
    tokens = torch.tensor([text])
    if isinstance(model, T5):
        return model(torch.tensor([PROMPTS[number]]), tokens)[0]
    return model(tokens)[0]


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3, 6])
@pytest.mark.parametrize("name", TALKERS)
def test_what_is_kept_changes_no_logits(name, chunk):
    """Rows of different lengths: each prompt in chunks, then a token of each row at a time."""
    model = talker(name).eval()
    decoder = decoder_of(model, [3])
    expected = [whole_logits(model, i, text) for i, text in enumerate(TEXTS)]

    def logits(row: int, lengths: list[int], tokens: list[list[int]]) -> Tensor:
        span = RowSpan(row, lengths, len(tokens[0]))
        given = torch.tensor(tokens)
        return decoder.logits(decoder.hidden(0, span, given, None), tuple(given.shape))

    for row, (text, begun) in enumerate(zip(TEXTS, BEGUN, strict=True)):
        decoder.read(0, row, PROMPTS[row])
        for at in range(0, begun, chunk):
            part = text[at : min(at + chunk, begun)]
            found = logits(row, [at], [part])
            torch.testing.assert_close(
                found[0], expected[row][at + len(part) - 1], rtol=0, atol=1e-12
            )
    for step in range(2):
        lengths = [begun + step for begun in BEGUN]
        found = logits(0, lengths, [[text[n]] for text, n in zip(TEXTS, lengths, strict=True)])
        wanted = torch.stack([expected[row][n] for row, n in enumerate(lengths)])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert (expected[0][0] - expected[1][0]).abs().max() > 0.1  # texts matter


@pytest.mark.parametrize("name", TALKERS)
def test_a_row_does_not_depend_on_the_others(name):
    """Two rows for five prompts, so that rows are handed over, against each prompt alone; a prompt
    of an iterator; an end token; prompts in chunks."""
    model = talker(name)
    options = {"max_new": 8, "temperature": 1.0, "seed": 3, "end": 6}
    together = list(generate(model, PROMPTS, rows=2, **options))
    alone = [
        next(iter(generate(model, [prompt], first_row=i, **options)))
        for i, prompt in enumerate(PROMPTS)
    ]
    later = list(generate(model, (torch.tensor(p) for p in PROMPTS), rows=3, chunk=2, **options))
    assert model.training
    for row, other, third, number in zip(together, alone, later, itertools.count(), strict=False):
        assert row.number == number
        assert row.prompt == PROMPTS[number]
        assert row.tokens == other.tokens == third.tokens
        assert row.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-12)
        assert row.ended == (row.tokens[-1] == 6)
        assert 6 not in row.tokens[:-1]
        assert row.ended or len(row.tokens) == 8
    assert len(together) == len(later) == 5
    assert len({len(row.tokens) for row in together}) > 1, "no row ended before another"
    assert len({tuple(row.tokens) for row in together}) > 3


def test_no_more_rows_are_kept_than_there_are_prompts(monkeypatch):
    """Where their number is known: of an iterator, as many as are asked for."""
    kept = []
    monkeypatch.setattr(
        generating,
        "decoder_of",
        lambda model, rows, *a: kept.append(rows) or decoder_of(model, rows, *a),
    )
    for prompts, rows in ((PROMPTS, 16), (PROMPTS, 3), (PROMPTS[:1], 16), (iter(PROMPTS), 16)):
        found = list(generate(talker("gpt"), prompts, max_new=1, rows=rows))
        assert len(found) == (1 if prompts == PROMPTS[:1] else 5)
    assert kept == [[5], [3], [1], [16]]
    assert list(generate(talker("gpt"), [], max_new=1)) == []


@torch.no_grad()
@pytest.mark.parametrize("name", TALKERS)
def test_log_likelihoods_are_those_of_score(name):
    """Of whole rows of different lengths, padded with a token that is one of the vocabulary; each
    against the logits."""
    model = talker(name).eval()
    rows = list(generate(model, PROMPTS, max_new=5, temperature=1.3, top_k=7, seed=1, end=2))
    begun = [[] if name == "t5" else row.prompt for row in rows]
    texts = [begin + row.tokens for begin, row in zip(begun, rows, strict=True)]
    most = max(map(len, texts))
    tokens = torch.tensor([text + [3] * (most - len(text)) for text in texts])
    lengths, first = [list(map(len, each)) for each in (texts, begun)]
    more = {}
    if name == "t5":
        padded = torch.tensor([p + [3] * (7 - len(p)) for p in PROMPTS])
        more = {"prompts": (padded, list(map(len, PROMPTS)))}
    found = score(model, tokens, lengths, first=first, **more)
    expected = torch.tensor([row.log_likelihood for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    means = score(model, tokens, lengths, first=first, reduction="mean", **more)
    counts = torch.tensor([len(row.tokens) for row in rows])
    torch.testing.assert_close(means * counts, expected, rtol=0, atol=1e-12)
    seen = texts[0] if name != "t5" else [0, *texts[0][:-1]]
    log_p = whole_logits(model, 0, seen).log_softmax(-1)
    by_hand = sum(
        float(log_p[place - (name != "t5"), texts[0][place]])
        for place in range(first[0], len(texts[0]))
    )
    assert float(found[0]) == pytest.approx(by_hand, abs=1e-12)


def test_the_likeliest_tokens_are_those_of_sample():
    model = talker("llama")
    prompt = torch.tensor(PROMPTS[0])
    expected = sample(model, prompt, num_tokens=20, context=24, temperature=0).tolist()
    (row,) = generate(model, [prompt], max_new=20, temperature=0)
    assert row.prompt + row.tokens == expected


def test_keys_and_values_are_kept_in_another_dtype():
    """In 16 bits, which changes the logits by no more than their rounding; they take half."""
    model = talker("gpt").eval()
    sizes, logits = [], []
    with torch.no_grad():
        for dtype in (None, torch.float32):
            decoder = decoder_of(model, [1], dtype)
            tokens = torch.tensor([TEXTS[0]])
            x = decoder.hidden(0, RowSpan(0, [0], 6, reserve=9), tokens, None)
            logits.append(decoder.logits(x, (1, 6)))
            sizes.append(sum(cache.num_bytes for cache in decoder.caches[0]))
    assert sizes == [2 * 2 * 9 * 8 * 8, 2 * 2 * 9 * 8 * 4]  # layers, k and v, places, dim, bytes
    difference = (logits[0] - logits[1]).abs().max()
    assert 0 < difference < 1e-5


def found(logits: list[list[float]], most: int | None) -> Candidates:
    values = torch.tensor(logits, dtype=torch.float64)
    return candidates_of(
        values, Ranks.of(ALONE), vocab_size=values.shape[1], first_word=0, most=most
    )


def test_choosing():
    """Literals: top_k with ties that go to the lower word, then top_p, then a draw by the running
    sum of what is left."""
    logits = [[math.log(p) for p in (0.1, 0.3, 0.3, 0.2, 0.1)]]

    def words(draws: list[float], **options: float | int) -> list[int]:
        chosen = GenerateOptions(**options)
        candidates = found(logits, chosen.most)
        result = [choose(candidates, chosen, torch.tensor([u]).double()) for u in draws]
        for each in result:
            word = int(each.words_R)
            assert float(each.log_likelihood_R) == pytest.approx(logits[0][word], abs=1e-12)
        return [int(each.words_R) for each in result]

    edges = [0.0, 0.09, 0.11, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, 1 - 2**-24]
    assert words(edges, temperature=1.0) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert words([0.99], temperature=0.0) == [1]
    assert words([0.0, 0.49, 0.51, 0.99], temperature=1.0, top_k=2) == [1, 1, 2, 2]
    assert words([0.0, 0.99], temperature=1.0, top_k=1) == [1, 1]
    # of 4: 0.3, 0.3, 0.2 and the first of the two 0.1
    assert words([0.0, 0.1, 0.12, 0.99], temperature=1.0, top_k=4) == [0, 0, 1, 3]
    assert words([0.0, 0.49, 0.51, 0.99], temperature=1.0, top_p=0.5) == [1, 1, 2, 2]
    assert words([0.0, 0.99], temperature=1.0, top_p=0.25) == [1, 1]
    assert words([0.0, 0.74, 0.76], temperature=1.0, top_p=0.61) == [1, 2, 3]
    # exactly: the first of 1/2, 1/4, 1/4 reaches 1/2, and no other is needed
    halves = found([[math.log(2), 0.0, 0.0]], None)
    options = GenerateOptions(temperature=1.0, top_p=0.5)
    assert int(choose(halves, options, torch.tensor([0.99]).double()).words_R) == 0
    # of top_k = 3 the probabilities are 3/8, 3/8, 2/8: two of them reach 0.7
    assert words([0.0, 0.99], temperature=1.0, top_k=3, top_p=0.7) == [1, 2]
    assert words([0.2, 0.8], temperature=0.01) == [1, 2]


def test_draws_are_keyed_by_row_and_place():
    assert torch.equal(draws(1, 5, 3, 4), draws(1, 5, 0, 9)[3:7])
    others = [draws(2, 5, 3, 4), draws(1, 6, 3, 4), draws(1, 5, 4, 4)]
    assert not any(torch.equal(draws(1, 5, 3, 4), other) for other in others)
    rows = [*range(200), 2**22, 2**23 - 1]
    many = torch.stack([draws(0, row, 0, 10) for row in rows])
    assert float(many.mean()) == pytest.approx(0.5, abs=0.03)
    # No two rows have a draw in common, whatever lies between them, at equal places or at others.
    assert len(many.unique()) == many.numel()


def test_rows_of_one_prompt_are_drawn_apart():
    """Each of six rows of the same prompt has a text of its own, which is that of the row alone."""
    model = talker("gpt")
    options = {"max_new": 6, "temperature": 1.5, "seed": 2}
    together = [row.tokens for row in generate(model, [[1, 2]] * 6, rows=4, **options)]
    assert len({tuple(tokens) for tokens in together}) == 6
    for number, tokens in enumerate(together):
        (alone,) = generate(model, [[1, 2]], first_row=number, **options)
        assert alone.tokens == tokens


def test_a_text_goes_on_as_it_would_have():
    """Its beginning as a prompt: the draws belong to places."""
    model = talker("gpt")
    (row,) = generate(model, [[1, 2]], max_new=9, temperature=1.0, seed=5)
    (rest,) = generate(model, [[1, 2, *row.tokens[:4]]], max_new=5, temperature=1.0, seed=5)
    assert row.tokens[4:] == rest.tokens
    assert len(set(row.tokens)) > 2


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[]], {}, "prompt 0 has no tokens"),
        ([[1], [1, 13]], {}, "prompt 1 has the token 13, outside the vocabulary of 13"),
        ([[1] * 20], {"max_new": 5}, "prompt 0 of 20 tokens and max_new 5 are 25 tokens"),
        ([torch.ones(1, 2, dtype=torch.int64)], {}, r"prompt 0 is torch.int64 \[1, 2\]"),
        ([[1]], {"top_p": 0.0}, "top_p is 0.0"),
        ([[1]], {"top_p": 1.1}, "top_p is 1.1"),
        ([[1]], {"top_k": -1}, "top_k is -1"),
        ([[1]], {"temperature": -1.0}, "temperature is -1.0"),
        ([[1]], {"temperature": math.nan}, "temperature is nan"),
        ([[1]], {"rows": 0}, "rows is 0"),
        ([[1]], {"max_new": 0}, "max_new is 0"),
        ([[1]], {"cache_dtype": torch.int8}, "cache_dtype is torch.int8"),
        ([[1]], {"cache_dtype": torch.float8_e4m3fn}, "cache_dtype is torch.float8_e4m3fn"),
        ([[1]], {"max_new": 2.0}, "max_new is 2.0; give a whole number, 1 or more"),
        ([[1]], {"temperature": "1"}, "temperature is '1'; give 0"),
        ([[1]], {"top_p": None}, "top_p is None; give a probability"),
        ([[1]], {"seed": 1.5}, "seed is 1.5; give a whole number"),
        ([[1]], {"end": 13}, "end is 13, outside the vocabulary of 13"),
        ([[1]], {"end": [2, "."]}, r"end is \[2, '.'\]; give a token"),
        ([[1]], {"end": torch.tensor([1])}, "give a token, a whole number"),
        ([[1]], {"first_row": 2**23}, "first_row is 8388608; give a whole number, from 0 to"),
        ([torch.ones(2, dtype=torch.bool)], {}, r"prompt 0 is torch.bool \[2\]"),
        ([[1], [1, 1.5]], {}, "prompt 1 has 1.5, which is no token"),
        ([[True]], {}, "prompt 0 has True, which is no token"),
        ([1, 2], {}, "prompt 0 is 1; give the numbers of its tokens, a list of them for each"),
        (["text"], {}, "prompt 0 is 'text'; give the numbers of its tokens"),
        ("text", {}, "prompts is 'text'; give a list of prompts"),
        (None, {}, "prompts is None; give a list of prompts"),
    ],
)
def test_what_can_not_be_generated_is_refused(prompts, options, message):
    """Before anything is computed."""
    model = talker("gpt")
    model.embedding.register_forward_pre_hook(lambda *_: pytest.fail("computed"))
    with pytest.raises((ValueError, TypeError), match=message):
        generate(model, prompts, **{"max_new": 4, **options})
    assert model.training


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 2}], ids=str)
def test_logits_that_are_not_finite_end_it(options):
    """With the row and the place, however tokens are chosen; the model is in training again."""
    model = talker("gpt")
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="logits of row 3 are not finite behind 2 tokens"):
        list(generate(model, [[1, 2]], max_new=2, first_row=3, **options))
    assert model.training
    meta = GPT(TALKERS["gpt"][1], seed=None, device="meta")
    with pytest.raises(ValueError, match=r"weight is on meta and has no numbers"):
        generate(meta, [[1, 2]])


def test_no_temperature_is_too_small_to_divide_by():
    model = talker("gpt")
    (likeliest,) = generate(model, [[1, 2]], max_new=5, temperature=0)
    (cold,) = generate(model, [[1, 2]], max_new=5, temperature=1e-310)
    assert cold.tokens == likeliest.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [1, 2]}, "the prompt is list; give the numbers of its tokens"),
        ({"prompt": torch.ones(2)}, "the prompt is torch.float32"),
        ({"prompt": torch.tensor([99])}, "outside the vocabulary"),
        ({"num_tokens": -1}, "num_tokens is -1; give a whole number, 0 or more"),
        ({"context": 0}, "context is 0; give a whole number, 1 or more"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"seed": "x"}, "seed is 'x'; give a whole number"),
    ],
)
def test_what_can_not_be_sampled_is_refused(options, message):
    model = talker("gpt")
    given = {"prompt": torch.tensor([1, 2]), "num_tokens": 2, "context": 8, **options}
    with pytest.raises(ValueError, match=message):
        sample(model, **given)
    assert model.training


def test_models_that_do_not_generate_are_refused():
    bert = BERT(BERTConfig(vocab_size=VOCAB, num_layers=1, num_heads=1, dim=4))
    with pytest.raises(TypeError, match="the model is BERT"):
        generate(bert, [[1]])
    with pytest.raises(TypeError, match="the model is BERT"):
        score(bert, torch.ones(1, 2, dtype=torch.int64))
    config = dataclasses.replace(TALKERS["gpt"][1], pattern="SlidingWindow()", pattern_block=16)
    with pytest.raises(ValueError, match=r"by the pattern .*pyops.models.sample"):
        generate(GPT(config), [[1]])

    class Foreign(torch.nn.Module):
        def generate(self) -> None: ...

    with pytest.raises(TypeError, match="call its own generate"):
        generate(Foreign(), [[1]])
    model = GPT(GPTConfig(vocab_size=VOCAB, num_layers=2, num_heads=1, dim=4))
    model.keep_layers([0, 1])
    with pytest.raises(ValueError, match="only some of the model's layers"):
        generate(model, [[1]])
    with pytest.raises(TypeError, match="num_beams"):
        generate(talker("gpt"), [[1]], num_beams=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": [4]}, "lengths is"),
        ({"lengths": [4, 2], "first": [1, 9]}, "first is"),
        ({"reduction": "none"}, "reduction is 'none'"),
        ({"prompts": (torch.ones(2, 2), [2, 2])}, "leave it out for GPT"),
        ({"tokens": [[1, 2]]}, r"tokens is list; give a tensor int64 \[B, T\]"),
        ({"lengths": "ab"}, "lengths is 'ab'; give a whole number from 0 to 4"),
        ({"lengths": [True, False]}, r"lengths is \[True, False\]"),
    ],
)
def test_what_can_not_be_scored_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        score(talker("gpt"), **{"tokens": torch.ones(2, 4, dtype=torch.int64), **given})


def test_prompts_that_an_encoder_can_not_read_are_refused():
    model, tokens = talker("t5"), torch.ones(2, 4, dtype=torch.int64)
    for prompts, message in (
        (tokens, r"prompts is a Tensor; give \(tokens \[B, S\], lengths \[B\]\)"),
        ((tokens[:1], [4]), "prompts of 1 rows, but tokens of 2"),
        ((tokens, [0, 1]), "give each prompt a token or more"),
    ):
        with pytest.raises(ValueError, match=message):
            score(model, tokens, prompts=prompts)
    assert score(model, tokens[:0], prompts=(tokens[:0], [])).shape == (0,)
    assert score(talker("gpt"), tokens[:, :0]).tolist() == [0.0, 0.0]
