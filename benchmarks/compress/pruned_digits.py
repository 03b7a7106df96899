"""Digits of scikit-learn under pruning: the runs of `docs/pruning.md` and of the tests.

A multilayer perceptron 64-256-128-10 on half of the 1,797 images, judged on the other half. The
batch of a step depends on the step's number and the seed alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyops.data.digits import load_digits
from pyops.optim import AdamW
from pyops.pruning import CubicSchedule, Masks, gradual, hold, magnitude

__all__ = [
    "ALL",
    "EPOCH",
    "Digits",
    "dense",
    "load",
    "network",
    "one_shot",
    "prune_gradually",
    "train",
]

ALL = ["*.weight"]  # every matrix, the last one too
BATCH = 64
EPOCH = 14  # steps
RATE, DECAY = 1e-3, 1e-4
DENSE_EPOCHS, AFTER_EPOCHS, GRADUAL_EPOCHS = 40, 15, 40
EVERY = 2  # steps from one mask to the next


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 numbers, and their labels: to train on, and held out."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    def accuracy(self, model: nn.Module) -> float:
        """On what was held out, in percent."""
        with torch.no_grad():
            return 100 * float((model(self.test_x).argmax(1) == self.test_y).float().mean())

    def loss(self, model: nn.Module, step: int, *, seed: int) -> Tensor:
        """Of the batch of a step: each epoch has an order of its own."""
        epoch, at = divmod(step, EPOCH)
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        rows = torch.randperm(len(self.x), generator=generator)[BATCH * at : BATCH * (at + 1)]
        return nn.functional.cross_entropy(model(self.x[rows]), self.y[rows])


def load() -> Digits:
    """Half of the images to train on, half held out."""
    own, held_out = load_digits()
    return Digits(own.images.flatten(1), own.labels, held_out.images.flatten(1), held_out.labels)


def network(seed: int, widths: Sequence[int] = (64, 256, 128, 10)) -> nn.Sequential:
    """Linear layers with ReLU between them; first values of this seed."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(
    digits: Digits,
    model: nn.Module,
    masks: Masks | None = None,
    *,
    last: int,
    first: int = 0,
    seed: int = 0,
    each: Callable[[], object] | None = None,
    optimizer: AdamW | None = None,
) -> nn.Module:
    """Steps `first` to `last` of AdamW, with the masks held.

    Args:
        digits: The images.
        model: What is trained, in place.
        masks: Of pruned weights; None: there are none.
        last: The step behind the last one.
        first: The first step.
        seed: Of the order of the images.
        each: Called after each step.
        optimizer: The one to use; None: a new one.
    """
    adam = optimizer or AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    held = None if masks is None else hold(masks, adam)
    for step in range(first, last):
        adam.zero_grad()
        digits.loss(model, step, seed=seed).backward()
        adam.step()
        if each is not None:
            each()
    if held is not None:
        held.close()
    return model


def dense(digits: Digits, seed: int, *widths: int) -> nn.Sequential:
    """A network that was trained for DENSE_EPOCHS, with all its weights.

    Args:
        digits: The images.
        seed: Of the first values and of the order of the images.
        widths: Of the layers; none: 64-256-128-10.
    """
    model = network(seed, widths or (64, 256, 128, 10))
    train(digits, model, last=DENSE_EPOCHS * EPOCH, seed=seed)
    return model


def one_shot(
    digits: Digits, dense: nn.Module, sparsity: float, *, seed: int
) -> tuple[float, float]:
    """Accuracy at once, and after AFTER_EPOCHS more epochs; `dense` is changed."""
    masks = magnitude(dense, sparsity, only=ALL)
    at_once = digits.accuracy(dense)
    train(digits, dense, masks, last=AFTER_EPOCHS * EPOCH, seed=seed)
    masks.release()
    return at_once, digits.accuracy(dense)


def prune_gradually(digits: Digits, dense: nn.Module, sparsity: float, *, seed: int) -> float:
    """Accuracy after GRADUAL_EPOCHS, in the first three quarters of which a trained network is
    pruned; `dense` is changed."""
    adam = AdamW(dense.parameters(), lr=RATE, weight_decay=DECAY)
    steps = GRADUAL_EPOCHS * EPOCH
    schedule = CubicSchedule(
        final=sparsity, begin=0, every=EVERY, times=3 * steps // 4 // EVERY, total_steps=steps
    )
    with gradual(dense, adam, schedule, only=ALL) as pruner:
        train(digits, dense, last=steps, seed=seed, each=pruner.step, optimizer=adam)
    return digits.accuracy(dense)
