"""Whole training steps on a GPU: captured in a CUDA graph they give the bits of eager ones, and
none waits for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyops.data_parallel import DataParallel
from pyops.models import GPT, GPTConfig
from pyops.optim import LAMB, AdamW, Lion
from tests.conftest import DEVICE

pytestmark = pytest.mark.skipif(
    not DEVICE.startswith("cuda"), reason="needs a GPU: PYOPS_TEST_DEVICE=cuda"
)

CONFIGS = {
    "gpt2": GPTConfig(vocab_size=61, sequence_length=16, num_layers=2, num_heads=2, dim=32),
    "llama": GPTConfig(
        vocab_size=61,
        sequence_length=16,
        num_layers=2,
        num_heads=2,
        dim=32,
        norm="rmsnorm",
        activation="swiglu",
        positions="rotary",
        bias=False,
        tied_head=False,
    ),
}
WARM = 2  # steps before the capture; they count
Make = Callable[..., torch.optim.Optimizer]


class Training:
    """A model, its optimizer, and the memory that every step reads its batch from."""

    def __init__(
        self,
        device: torch.device,
        make: Make,
        *,
        config: str = "gpt2",
        dtype: torch.dtype = torch.float32,
        set_to_none: bool = True,
        **options: Any,
    ) -> None:
        self.model: nn.Module = GPT(CONFIGS[config], seed=7, device=device, dtype=dtype)
        self.optimizer = make(self.model.parameters(), **options)
        self.tokens = torch.zeros(4, 17, dtype=torch.int64, device=device)
        self.set_to_none = set_to_none

    def put(self, number: int) -> None:
        """The batch of a step."""
        self.tokens.copy_(
            torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(number))
        )

    def step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        # Of attention's kernels only this one adds up in the same order every time.
        with sdpa_kernel(SDPBackend.MATH):
            loss: Tensor = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        return (
            loss.detach()
        )  # nothing of this backward lives on, whose stream may be that of a capture

    def run(self, first: int, count: int) -> list[Tensor]:
        losses = []
        for number in range(first, first + count):
            self.put(number)
            losses.append(self.step().clone())
        return losses


def captured(training: Training, device: torch.device) -> Callable[[int], Tensor]:
    """The step as a graph: called with a batch's number, it replays."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        training.run(0, WARM)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = training.step()

    def replay(number: int) -> Tensor:
        training.put(number)
        graph.replay()
        return loss.clone()

    return replay


def assert_same(ours: Training, theirs: Training, start: dict[str, Tensor]) -> None:
    """Parameters and states have the same bits, and every parameter has moved."""
    for (name, p), q in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(p, q), f"{name} differs by {(p - q).abs().max()}"
        assert not torch.equal(p, start[name]), f"{name} was not stepped"
        for key, value in theirs.optimizer.state[q].items():
            assert torch.equal(ours.optimizer.state[p][key], value), f"{key} of {name}"


STEPS = [
    ("adamw", AdamW, {}),
    ("adamw without moments moving", AdamW, {"set_to_none": False}),
    ("clipped", AdamW, {"max_grad_norm": 0.05}),
    (
        "bf16 with masters",
        AdamW,
        {"dtype": torch.bfloat16, "master_weights": True, "max_grad_norm": 0.05},
    ),
    ("bf16 rounded at random", AdamW, {"dtype": torch.bfloat16, "stochastic_rounding": True}),
    ("llama", AdamW, {"config": "llama", "max_grad_norm": 1.0}),
    ("lamb", LAMB, {"max_grad_norm": 0.05}),
    ("lion", Lion, {}),
    ("amsgrad", AdamW, {"amsgrad": True, "zero_grad": True}),
]
EACH = pytest.mark.parametrize(
    ("make", "options"), [s[1:] for s in STEPS], ids=[s[0] for s in STEPS]
)


@EACH
def test_a_graph_of_a_whole_step_gives_the_bits_of_eager_steps(device, make, options):
    ours, theirs = (Training(device, make, lr=3e-3, capturable=True, **options) for _ in range(2))
    start = {name: p.detach().clone() for name, p in ours.model.named_parameters()}
    expected = theirs.run(0, WARM + 4)
    replay = captured(ours, device)
    found = [replay(number) for number in range(WARM, WARM + 4)]
    assert torch.equal(torch.stack(found), torch.stack(expected[WARM:]))
    assert len({float(loss) for loss in found}) == len(found), (
        "every replay must have read its own batch"
    )
    assert_same(ours, theirs, start)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("make", [AdamW, LAMB])
def test_eager_steps_between_replays(device, make, set_to_none):
    """An eager step takes other gradients, and is followed by one without any: neither may change
    what a replay steps."""
    options = {"lr": 3e-3, "capturable": True, "max_grad_norm": 0.5, "set_to_none": set_to_none}
    ours, theirs = (Training(device, make, **options) for _ in range(2))
    start = {name: p.detach().clone() for name, p in ours.model.named_parameters()}
    theirs.run(0, WARM + 6)
    replay = captured(ours, device)
    own = [p.grad for p in ours.model.parameters()]  # of the graph
    number = WARM
    for eager in (False, True, False, True, True, False):
        if eager:
            ours.model.zero_grad(set_to_none=True)
            ours.optimizer.step()  # of nothing
            ours.run(number, 1)
        else:
            for p, gradient in zip(ours.model.parameters(), own, strict=True):
                p.grad = gradient
            replay(number)
        number += 1
    assert_same(ours, theirs, start)


def test_a_replay_reads_the_learning_rate_from_its_tensor(device):
    lr = torch.tensor(0.0, device=device)
    training = Training(device, AdamW, lr=lr, capturable=True)
    replay = captured(training, device)
    before = [p.detach().clone() for p in training.model.parameters()]
    replay(5)
    assert all(torch.equal(p, q) for p, q in zip(training.model.parameters(), before, strict=True))
    lr.fill_(1e-2)
    replay(6)
    assert not any(
        torch.equal(p, q) for p, q in zip(training.model.parameters(), before, strict=True)
    )


@contextlib.contextmanager
def nothing_may_wait(device: torch.device) -> Iterator[None]:
    """Within the block torch raises where the host would wait for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps_without_waiting(
    device: torch.device, make: Make, *, parallel: bool = False, **options: Any
) -> None:
    training = Training(device, make, lr=3e-3, **options)
    if parallel:
        training.model = DataParallel(training.model)
    for number in range(2):  # kernels are loaded, and states made
        training.put(number)
        training.step()
    training.put(2)
    before = [p.detach().clone() for p in training.model.parameters()]
    with nothing_may_wait(device):
        for _ in range(3):
            training.step()
    assert not any(
        torch.equal(p, q) for p, q in zip(training.model.parameters(), before, strict=True)
    )


@EACH
def test_no_step_waits_for_the_device(device, make, options):
    steps_without_waiting(device, make, **options)


def test_data_parallel_alone_does_not_wait(device):
    steps_without_waiting(device, AdamW, parallel=True, max_grad_norm=0.5)


def test_the_mode_that_finds_waiting_does(device):
    with pytest.raises(RuntimeError, match="synchroniz"), nothing_may_wait(device):
        torch.ones(3, device=device).sum().item()


def test_not_even_the_first_step_copies_from_the_host(device):
    parameters = [nn.Parameter(torch.ones(5, device=device)) for _ in range(3)]
    for optimizer in (AdamW(parameters), LAMB(parameters)):
        for p in parameters:
            p.grad = torch.ones_like(p)
        with nothing_may_wait(device):
            optimizer.step()
    assert all(bool((p != 1).all()) for p in parameters)


def test_the_keys_of_dropout_are_set_without_waiting(device):
    config = GPTConfig(
        vocab_size=61,
        sequence_length=16,
        num_layers=1,
        num_heads=2,
        dim=32,
        dropout=0.5,
        attention_dropout=0.5,
    )
    model = GPT(config, device=device)
    tokens = torch.zeros(2, 16, dtype=torch.int64, device=device)
    losses = []
    for step in range(3):
        with nothing_may_wait(device) if step else contextlib.nullcontext():
            model.set_dropout((2, 16), seed=3, step=step)
            loss = model(tokens, tokens)
            loss.backward()
        losses.append(loss.item())
    assert len(set(losses)) == 3, "every step drops other elements"
