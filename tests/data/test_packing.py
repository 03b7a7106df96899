"""Packed rows: every token is learnt once, no document is cut that fits, the cursor is that of any
number of ranks, and the loss is that of the documents one by one."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pyops.data import (
    Corpus,
    CorpusError,
    DataConfig,
    PackedBatches,
    PackedRows,
    pack,
    packed_validation_rows,
    prepare,
)
from pyops.data.corpus import find_documents
from pyops.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.cpu_only

T = 8


def rows_of(lengths: list[int], *, sequence_length: int = T) -> PackedRows:
    """Documents of these lengths, whose tokens are all different: 1, 2, 3, and so on."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(1, sum(lengths) + 1)
    return pack(tokens, starts, sequence_length=sequence_length)


def random_lengths(seed: int, count: int = 60) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 * T + 3, (count,), generator=generator).tolist()


def test_a_literal():
    rows = rows_of([4, 3, 2, 1, 10], sequence_length=9)
    batch = {name: found.tolist() for name, found in rows.batch(range(len(rows))).items()}
    # The fourth document has one token; of the fifth the rest has one, which its piece learns.
    assert batch == {
        "tokens_BT": [[11, 12, 13, 14, 15, 16, 17, 18, 19], [1, 2, 3, 4, 5, 6, 7, 8, 9]],
        "targets_BT": [
            [12, 13, 14, 15, 16, 17, 18, 19, 20],
            [2, 3, 4, -100, 6, 7, -100, 9, -100],
        ],
        "documents_BT": [[0] * 9, [0, 0, 0, 0, 1, 1, 1, 2, 2]],
        "positions_BT": [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 0, 1, 2, 0, 1]],
    }
    assert rows.num_targets == 3 + 2 + 1 + 9
    assert rows.fill == 1.0


def test_padding_is_no_document():
    batch = rows_of([3, 7]).batch([0, 1])
    assert batch["tokens_BT"].tolist() == [[4, 5, 6, 7, 8, 9, 10, 0], [1, 2, 3, 0, 0, 0, 0, 0]]
    assert batch["documents_BT"].tolist() == [[0] * 7 + [-1], [0] * 3 + [-1] * 5]
    assert batch["targets_BT"].tolist() == [
        [5, 6, 7, 8, 9, 10, -100, -100],
        [2, 3] + [-100] * 6,
    ]
    assert batch["positions_BT"][1].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert [batch[name].dtype for name in batch] == [torch.int64] * 2 + [torch.int32, torch.int64]


@pytest.mark.parametrize("sequence_length", [1, 2, 3, T, 100])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_but_the_first_of_a_document_is_learnt_once(seed: int, sequence_length: int):
    lengths = random_lengths(seed)
    rows = rows_of(lengths, sequence_length=sequence_length)
    batch = rows.batch(range(len(rows)))
    learnt = batch["targets_BT"] != -100
    firsts = {1 + sum(lengths[:i]) for i, n in enumerate(lengths) if n}
    expected = sorted(set(range(1, sum(lengths) + 1)) - firsts)
    assert batch["targets_BT"][learnt].sort().values.tolist() == expected
    assert rows.num_targets == len(expected)
    # A target is the token after its own, and is learnt from a token of its document.
    assert torch.equal(batch["targets_BT"][learnt], batch["tokens_BT"][learnt] + 1)
    assert (batch["documents_BT"][learnt] >= 0).all()
    assert rows.fill == pytest.approx(float((batch["documents_BT"] >= 0).double().mean()))


@pytest.mark.parametrize("seed", range(3))
def test_no_document_is_cut_that_fits(seed: int):
    lengths = [n for n in random_lengths(seed) if n]
    rows = rows_of(lengths)
    batch = rows.batch(range(len(rows)))
    runs = {}
    for tokens, documents in zip(
        batch["tokens_BT"].tolist(), batch["documents_BT"].tolist(), strict=True
    ):
        inputs = [token for token in tokens if token]
        assert inputs == sorted(inputs)
        for number in sorted(set(documents) - {-1}):
            run = [token for token, d in zip(tokens, documents, strict=True) if d == number]
            assert run == list(range(run[0], run[0] + len(run)))
            runs[run[0]] = len(run)
    start = 1
    for n in lengths:
        if n <= T:
            assert runs.get(start, 0) == (n if n > 1 else 0)
        else:
            pieces = [runs.get(place, 0) for place in range(start, start + n, T)]
            rest = n % T
            assert pieces == [T] * (n // T) + ([rest if rest > 1 else 0] if rest else [])
        start += n


@pytest.mark.parametrize("seed", range(3))
def test_no_two_rows_would_fit_into_one(seed: int):
    rows = rows_of(random_lengths(seed))
    taken = (rows.batch(range(len(rows)))["documents_BT"] >= 0).sum(1).sort().values
    assert int(taken[0] + taken[1]) > T


def test_the_row_with_the_least_room_is_taken():
    rows = rows_of([5, 6, 2])  # the 2 goes beside the 6
    assert rows.batch([0])["documents_BT"].tolist() == [[0] * 6 + [1] * 2]
    assert rows.batch([1])["documents_BT"].tolist() == [[0] * 5 + [-1] * 3]


class Attends(nn.Module):
    """Two layers of causal attention within documents, with learned places, in double."""

    def __init__(self, vocabulary: int, width: int = 6) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(T, width)
        self.mixed = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)
        self.double()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        documents = batch["documents_BT"]
        causal = torch.ones(documents.shape[1], documents.shape[1], dtype=torch.bool).tril()
        seen = (documents[:, :, None] == documents[:, None, :]) & causal
        x = self.token(batch["tokens_BT"]) + self.place(batch["positions_BT"])
        for layer in self.mixed:
            q, k, v = layer(x).chunk(3, dim=-1)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return nn.functional.cross_entropy(
            self.head(x).flatten(0, 1), batch["targets_BT"].flatten(), reduction="sum"
        )


def test_the_loss_is_that_of_the_documents_one_by_one():
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    lengths = [5, 2, 8, 3, 21, 1, 4, 9, 6]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = generator.integers(0, 11, size=starts[-1])
    model = Attends(11)
    rows = pack(tokens, starts, sequence_length=T)
    loss = model(rows.batch(range(len(rows))))
    loss.backward()
    packed = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    one_by_one = 0.0
    for start, end in itertools.pairwise(starts):
        for first in range(int(start), int(end), T):  # a long document: a piece after the other
            text = torch.from_numpy(tokens[first : min(first + T + 1, int(end))])
            if len(text) < 2:
                continue
            inputs, targets = text[:T], text[1:]
            inputs = inputs[: len(targets)]
            alone = {
                "tokens_BT": inputs[None],
                "targets_BT": targets[None],
                "documents_BT": torch.zeros(1, len(inputs), dtype=torch.int32),
                "positions_BT": torch.arange(len(inputs))[None],
            }
            part = model(alone)
            part.backward()
            one_by_one += float(part.detach())
    assert float(loss.detach()) == pytest.approx(one_by_one, rel=1e-12)
    for found, parameter in zip(packed, model.parameters(), strict=True):
        assert float(parameter.grad.abs().max()) > 1e-3
        torch.testing.assert_close(found, parameter.grad, rtol=1e-10, atol=1e-12)


def corpus_of(seed: int = 0, *, digest: str = "d", count: int = 60) -> Corpus:
    lengths = [n for n in random_lengths(seed, count) if n]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.arange(1, starts[-1] + 1)
    held = starts[:11]
    return Corpus("a.txt", tokens, tokens[: held[-1]], ByteTokenizer(), 1.0, digest, starts, held)


def batches_of(corpus: Corpus, **more: Any) -> PackedBatches:
    return PackedBatches(corpus, **({"sequence_length": T, "global_batch": 8, "seed": 3} | more))


def take(batches: PackedBatches, steps: int) -> Tensor:
    """The steps' tokens, targets, documents and positions: [steps, 4, rows, T]."""
    return torch.stack([torch.stack(list(batches.next().values())) for _ in range(steps)])


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_share_the_batch_of_one(num_ranks: int):
    corpus = corpus_of()
    whole = take(batches_of(corpus), 20)
    parts = [take(batches_of(corpus, rank=r, num_ranks=num_ranks), 20) for r in range(num_ranks)]
    assert torch.equal(torch.cat(parts, dim=2), whole)


def test_an_epoch_has_each_row_once_and_epochs_differ():
    batches = batches_of(corpus_of())
    per_epoch = len(batches.rows) // 8
    assert per_epoch > 3
    epochs = [
        [tuple(row) for row in take(batches, per_epoch)[:, 0].flatten(0, 1).tolist()]
        for _ in range(2)
    ]
    assert all(len(set(epoch)) == 8 * per_epoch for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("steps", [0, 1, 5, 11])
def test_the_cursor_continues_exactly_on_another_number_of_ranks(steps: int):
    corpus = corpus_of()
    two = [batches_of(corpus, rank=r, num_ranks=2) for r in range(2)]
    for batches in two:
        for _ in range(steps):
            batches.next()
    state = two[0].state_dict()
    assert state == two[1].state_dict()
    one = batches_of(corpus)
    one.load_state_dict(state)
    assert torch.equal(take(one, 9), torch.cat([take(each, 9) for each in two], dim=2))
    assert one.state_dict() == two[0].state_dict() != state


def test_what_is_refused():
    corpus = corpus_of()
    state = batches_of(corpus).state_dict()
    for other, message in (
        (batches_of(corpus_of(digest="other")), "digest d, but is now at digest other"),
        (batches_of(corpus, seed=4), "seed 3, but is now at seed 4"),
        (batches_of(corpus, sequence_length=9), "sequence_length 8, but is now at sequence_length"),
    ):
        with pytest.raises(CorpusError, match=message):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="8 sequences can't be shared by 3 ranks"):
        batches_of(corpus, num_ranks=3)
    with pytest.raises(CorpusError, match=r"a.txt has 5 rows of 8 tokens .*lower train.batch"):
        batches_of(corpus_of(count=6))
    without = Corpus("a.txt", corpus.train, corpus.validation, ByteTokenizer(), 1.0, "d")
    with pytest.raises(CorpusError, match=re.escape('with data.packing = "documents"')):
        batches_of(without)
    with pytest.raises(CorpusError, match=re.escape('with data.packing = "documents"')):
        packed_validation_rows(without, sequence_length=T, num_sequences=1)
    with pytest.raises(ValueError, match="sequence_length is 0; a row has 1 token or more"):
        rows_of([3], sequence_length=0)


def test_validation_rows_are_spread_evenly_and_shared():
    corpus = corpus_of()
    every = packed_validation_rows(corpus, sequence_length=T, num_sequences=99)
    count = len(every["tokens_BT"])
    assert count > 5
    rows = packed_validation_rows(corpus, sequence_length=T, num_sequences=5)
    for name, found in rows.items():
        assert torch.equal(found, every[name][[i * count // 5 for i in range(5)]])
        parts = [
            packed_validation_rows(corpus, sequence_length=T, num_sequences=5, rank=r, num_ranks=7)[
                name
            ]
            for r in range(7)
        ]
        assert [len(part) for part in parts] == [1] * 5 + [0] * 2
        assert torch.equal(torch.cat(parts), found)


def files(tmp_path: Path, texts: dict[str, str], **more: Any) -> DataConfig:
    (tmp_path / "text").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "text" / name).write_text(text)
    return DataConfig(
        path=str(tmp_path / "text"),
        cache=str(tmp_path / "cache"),
        **{"packing": "documents", "validation_fraction": 0.3, **more},
    )


TEXTS = {f"{n}.txt": "".join(f"line {i} of {n}\n" for i in range(n)) for n in (0, 1, 7, 30, 12)}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_cache_keeps_where_documents_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
):
    config = files(tmp_path / "a", TEXTS, tokenizer=tokenizer)
    corpus = prepare(config, vocab_size=300)
    assert corpus.train_starts is not None
    assert corpus.validation_starts is not None
    parts = []
    for tokens, starts in (
        (corpus.train, corpus.train_starts),
        (corpus.validation, corpus.validation_starts),
    ):
        assert (starts[0], starts[-1]) == (0, tokens.size)
        parts.append(
            [
                corpus.tokenizer.decode(tokens[start:end])
                for start, end in itertools.pairwise(starts)
            ]
        )
    train, held_out = parts
    whole = [*train[:-1], train[-1] + held_out[0], *held_out[1:]]  # one is cut on the border
    assert sorted(whole) == sorted(f"{text}\n" for text in TEXTS.values())
    assert prepare(config, vocab_size=300).train_starts.tolist() == corpus.train_starts.tolist()
    monkeypatch.setattr("pyops.data.corpus.PIECE_BYTES", 20)
    pieces = prepare(files(tmp_path / "b", TEXTS, tokenizer=tokenizer), vocab_size=300)
    if tokenizer == "bytes":
        assert pieces.train_starts.tolist() == corpus.train_starts.tolist()
    assert len(pieces.train_starts) == len(corpus.train_starts)


def test_the_same_text_in_other_documents_is_another_cache(tmp_path: Path):
    one = files(tmp_path / "a", {"x.txt": "a" * 100 + "\n" + "b" * 99})
    other = files(tmp_path / "b", {"1.txt": "?", "2.txt": "?"})
    for document, text in zip(find_documents(other), ("a" * 100, "b" * 99), strict=True):
        document.path.write_text(text)
    packed = [prepare(config) for config in (one, other)]
    plain = [prepare(replace(config, packing="none")) for config in (one, other)]
    assert len({bytes(each.train) + bytes(each.validation) for each in (*packed, *plain)}) == 1
    assert plain[0].digest == plain[1].digest
    assert len({each.digest for each in (*packed, *plain)}) == 3
    assert [len(each.train_starts) - 1 for each in packed] == [1, 2]
    assert plain[0].train_starts is None


def test_damaged_starts_are_named(tmp_path: Path):
    config = files(tmp_path, TEXTS)
    folder = tmp_path / "cache" / prepare(config).digest
    np.array([0, 5], dtype=np.int64).tofile(folder / "train.starts.bin")
    with pytest.raises(CorpusError, match=r"train.starts.bin has no starts of .*delete that folde"):
        prepare(config)
    (folder / "train.starts.bin").unlink()
    with pytest.raises(CorpusError, match=r"train.starts.bin is not there on this rank"):
        prepare(config)


def test_a_packing_that_there_is_not():
    with pytest.raises(ValueError, match=r"packing is 'yes'; choose one of none, documents"):
        DataConfig(packing="yes")
