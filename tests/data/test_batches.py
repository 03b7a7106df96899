"""The global batch is the same on any number of ranks, and the cursor continues exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pyops.data import Batches, ByteTokenizer, Corpus, CorpusError, validation_rows

pytestmark = pytest.mark.cpu_only

T = 4


def corpus_of(num_train: int, num_validation: int = 50, digest: str = "d") -> Corpus:
    """Token i of the train part is i, of the validation part 1000 + i, so that rows tell where they
    are from."""
    train, validation = (
        np.arange(num_train, dtype=np.uint16),
        1000 + np.arange(num_validation, dtype=np.uint16),
    )
    return Corpus("a.txt", train, validation, ByteTokenizer(), 2.5, digest)


def batches_of(
    corpus: Corpus, *, rank: int = 0, num_ranks: int = 1, seed: int = 3, batch: int = 8
) -> Batches:
    return Batches(
        corpus, sequence_length=T, global_batch=batch, seed=seed, rank=rank, num_ranks=num_ranks
    )


def take(batches: Batches, count: int) -> torch.Tensor:
    return torch.stack([batches.next() for _ in range(count)])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_global_batch_is_the_same_on_any_number_of_ranks(num_ranks):
    corpus = corpus_of(T * 45 + 1)
    whole = take(batches_of(corpus), 12)  # two epochs and more
    parts = [batches_of(corpus, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
    assert [p.first_row for p in parts] == [r * 8 // num_ranks for r in range(num_ranks)]
    assert torch.equal(torch.cat([take(p, 12) for p in parts], dim=1), whole)


def test_rows_are_sequences_and_their_next_token():
    rows = batches_of(corpus_of(T * 45 + 1)).next()
    assert rows.dtype == torch.int64
    assert rows.shape == (8, T + 1)
    assert torch.equal(rows - rows[:, :1], torch.arange(T + 1).expand(8, -1))
    assert (rows[:, 0] % T == 0).all()


def test_an_epoch_visits_each_sequence_at_most_once_and_each_is_another_order():
    batches = batches_of(corpus_of(T * 45 + 1))
    epochs = [take(batches, 5)[:, :, 0].flatten().tolist() for _ in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == 40
        assert epoch != sorted(epoch)
    assert epochs[0] != epochs[1] != epochs[2]
    assert len({i for epoch in epochs for i in epoch}) == 45, (
        "what one epoch leaves out, another must reach"
    )
    other = take(batches_of(corpus_of(T * 45 + 1), seed=4), 5)[:, :, 0].flatten().tolist()
    assert other != epochs[0]


def test_every_token_can_be_reached():
    assert batches_of(corpus_of(T * 8 + 1)).num_sequences == 8
    assert take(batches_of(corpus_of(T * 8 + 1)), 1).max() == T * 8
    with pytest.raises(CorpusError, match="has 7 sequences"):
        batches_of(corpus_of(T * 8))


@pytest.mark.parametrize("steps", [0, 1, 5, 7, 11])
def test_the_cursor_continues_exactly(steps):
    corpus = corpus_of(T * 45 + 1)
    first = batches_of(corpus, rank=1, num_ranks=2)
    take(first, steps) if steps else None
    state = first.state_dict()
    again = batches_of(corpus, rank=1, num_ranks=2)
    again.load_state_dict(state)
    assert torch.equal(take(again, 9), take(first, 9))
    assert again.state_dict() == first.state_dict() != state


def test_the_cursor_of_two_ranks_continues_on_one():
    corpus = corpus_of(T * 45 + 1)
    two, one, whole = batches_of(corpus, num_ranks=2), batches_of(corpus), batches_of(corpus)
    take(two, 7), take(whole, 7)
    one.load_state_dict(two.state_dict())
    assert torch.equal(take(one, 3), take(whole, 3))


def test_a_cursor_of_another_order_is_refused():
    state = batches_of(corpus_of(T * 45 + 1)).state_dict()
    with pytest.raises(ValueError, match=r"digest d, but is now at digest other.*same corpus"):
        batches_of(corpus_of(T * 45 + 1, digest="other")).load_state_dict(state)
    with pytest.raises(ValueError, match=r"seed 3, but is now at seed 4.*same train.seed"):
        batches_of(corpus_of(T * 45 + 1), seed=4).load_state_dict(state)


def test_what_ranks_cannot_share():
    with pytest.raises(
        ValueError, match="8 sequences can't be shared by 3 ranks; make it a multiple of 3"
    ):
        batches_of(corpus_of(T * 45 + 1), num_ranks=3)
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        batches_of(corpus_of(T * 45 + 1), rank=2, num_ranks=2)
    with pytest.raises(CorpusError, match=r"a.txt has 5 sequences of 4 tokens.*lower train.batch"):
        batches_of(corpus_of(T * 5 + 1))


def test_validation_rows_are_spread_evenly_and_shared():
    corpus = corpus_of(10, num_validation=T * 10 + 1)
    rows = validation_rows(corpus, sequence_length=T, num_sequences=5)
    assert rows[:, 0].tolist() == [1000 + T * i for i in (0, 2, 4, 6, 8)]
    parts = [
        validation_rows(corpus, sequence_length=T, num_sequences=5, rank=r, num_ranks=3)
        for r in range(3)
    ]
    assert sorted(torch.cat(parts)[:, 0].tolist()) == rows[:, 0].tolist()
    assert validation_rows(corpus, sequence_length=T, num_sequences=99).shape == (10, T + 1)
    assert validation_rows(
        corpus, sequence_length=T, num_sequences=1, rank=1, num_ranks=2
    ).shape == (0, T + 1)


def test_a_file_of_real_tokens(tmp_path: Path):
    from pyops.data import DataConfig, prepare

    (tmp_path / "t").write_text("abcdefgh" * 100)
    corpus = prepare(
        DataConfig(path=str(tmp_path / "t"), cache=str(tmp_path / "c")), sequence_length=T
    )
    row = batches_of(corpus).next()[0]
    assert bytes(row.tolist()) in b"abcdefgh" * 3
