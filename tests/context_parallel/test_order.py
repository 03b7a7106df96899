"""Order: who holds which tokens, by literals; padding; what is refused."""

from __future__ import annotations

import pytest
import torch

from pyops.context_parallel import ORDERS, Order, pad_tokens

pytestmark = pytest.mark.cpu_only

HOLDERS = {
    "contiguous": "0000111122223333",
    "striped": "0123012301230123",
    "zigzag": "0011223333221100",
}
PAIRS = {
    "contiguous": [10, 26, 42, 58],
    "striped": [28, 32, 36, 40],
    "zigzag": [34, 34, 34, 34],
}


@pytest.mark.parametrize("name", HOLDERS)
def test_four_ranks_of_sixteen_tokens(name: str) -> None:
    order = Order.of(name, length=16, ranks=4)
    holders = torch.empty(16, dtype=torch.int64)
    for rank in range(4):
        holders[order.index(rank)] = rank
    assert "".join(map(str, holders.tolist())) == HOLDERS[name]
    assert order.causal_pairs() == PAIRS[name]
    assert all(bool((row[1:] > row[:-1]).all()) for row in order.places)


@pytest.mark.parametrize("name", ORDERS)
def test_a_row_comes_back_whole(name: str) -> None:
    documents = torch.arange(48) // 7
    order = Order.of(name, length=48, ranks=3, documents=documents)
    x = torch.randn(2, 48, 3)
    parts = [order.shard(x, rank=rank) for rank in range(3)]
    assert torch.equal(parts[1], x[:, order.index(1)])
    assert torch.equal(order.unshard(parts), x)
    turned = [order.shard(x.movedim(1, 2), rank=rank, dim=2) for rank in range(3)]
    assert torch.equal(order.unshard(turned, dim=2), x.movedim(1, 2))
    assert order.mark != Order.of("contiguous", length=96, ranks=3).mark


def test_documents_are_balanced() -> None:
    """One long document and many short ones: zigzag over the row is far from equal work."""
    documents = torch.cat([torch.zeros(256), torch.arange(1, 65).repeat_interleave(4)]).int()
    balanced = Order.of("balanced", length=512, ranks=4, documents=documents)
    zigzag = Order.of("zigzag", length=512, ranks=4)
    work, other = balanced.causal_pairs(documents), zigzag.causal_pairs(documents)
    assert sum(work) == sum(other) == 256 * 257 // 2 + 64 * 10
    assert max(work) < 1.1 * sum(work) / 4
    assert max(other) > 1.4 * sum(other) / 4
    padding = torch.full((512,), -1)
    assert (
        Order.of("balanced", length=512, ranks=4, documents=padding).causal_pairs(padding)
        == [0] * 4
    )


def test_padding_keeps_what_there_is() -> None:
    assert Order.padded_length("zigzag", length=17, ranks=4) == 24
    assert Order.padded_length("contiguous", length=17, ranks=4) == 20
    x = torch.tensor([[3, 1], [4, 1]])
    assert pad_tokens(x, 4, value=-100).tolist() == [[3, 1, -100, -100], [4, 1, -100, -100]]
    assert pad_tokens(x, 3, value=7, dim=0).tolist() == [[3, 1], [4, 1], [7, 7]]
    assert pad_tokens(x, 2, value=0) is x


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Order.of("ring", length=8, ranks=2), "order is 'ring'; choose one of zigzag"),
        (lambda: Order.of("zigzag", length=10, ranks=2), "pad the row to 12 .*, 2 more, targets"),
        (lambda: Order.of("striped", length=10, ranks=3), "pad the row to 12"),
        (lambda: Order.of("contiguous", length=0, ranks=3), "0 tokens over 3 ranks"),
        (lambda: Order.of("balanced", length=16, ranks=2), "give documents="),
        (
            lambda: Order.of("balanced", length=16, ranks=2, documents=torch.zeros(8)),
            "documents are of 8 tokens, and the order is for 16",
        ),
        (lambda: Order(torch.tensor([[0, 1], [1, 3]])), "each of 0 to 3 once"),
        (lambda: Order(torch.tensor([[0, 1], [2, 4]])), "each of 0 to 3 once"),
        (lambda: Order(torch.tensor([0, 1])), r"the shape \[2\]"),
        (
            lambda: Order.of("zigzag", length=8, ranks=2).shard(torch.zeros(1, 4), rank=0),
            "x has 4 tokens along dim 1, and the order is for 8",
        ),
        (
            lambda: Order.of("zigzag", length=8, ranks=2).unshard([torch.zeros(1, 4)]),
            r"parts of \[4\] tokens; the order has 2 ranks of 4",
        ),
        (lambda: pad_tokens(torch.zeros(1, 4), 3, value=0), "x has 4 tokens, more than 3"),
    ],
)
def test_refusals_say_what_fits(made, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made()


def test_an_order_of_other_numbers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be torch\.int64 on the CPU, got torch\.int32"):
        Order(torch.zeros(1, 1, dtype=torch.int32))
