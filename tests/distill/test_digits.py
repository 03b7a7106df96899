"""What students learn of images of digits: a class that they never saw, and labels that they never
had (Hinton et al., arXiv:1503.02531, section 3)."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from pyops.data.digits import load_digits
from pyops.distill import freeze, logits_divergence
from pyops.optim import AdamW
from pyops.tensor_parallel import DivergenceConfig
from tests.optional_packages import skip_module_without

skip_module_without("sklearn")
pytestmark = pytest.mark.cpu_only

CROSS_ENTROPY = nn.functional.cross_entropy


def network(*widths: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def trained(model: nn.Module, images: Tensor, loss_of: object, *, steps: int) -> nn.Module:
    """On draws of 128 images."""
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        drawn = torch.randint(len(images), (128,), generator=generator)
        optimizer.zero_grad()
        loss_of(model(images[drawn]), drawn).backward()  # type: ignore[operator]
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, and those held out."""
    own, held_out = load_digits()
    return own.images.flatten(1), own.labels, held_out.images.flatten(1), held_out.labels


@pytest.fixture(scope="module")
def teacher(digits: tuple[Tensor, ...]) -> nn.Module:
    x, y = digits[:2]
    made = network(64, 256, 128, 10, seed=0)
    return freeze(trained(made, x, lambda z, i: CROSS_ENTROPY(z, y[i]), steps=300))


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


@pytest.mark.full
def test_a_class_that_the_student_never_saw(digits, teacher):
    x, y, test_x, test_y = digits
    seen = x[y != 3]
    with torch.no_grad():
        said = teacher(seen)
    config = DivergenceConfig(temperature=8.0)
    student = trained(
        network(64, 64, 10, seed=1),
        seen,
        lambda z, i: logits_divergence(z, said[i], config=config),
        steps=500,
    )
    threes = test_y == 3
    assert accuracy(student, test_x[threes], test_y[threes]) >= 0.8
    alone = trained(
        network(64, 64, 10, seed=1), seen, lambda z, i: CROSS_ENTROPY(z, y[y != 3][i]), steps=200
    )
    assert accuracy(alone, test_x[threes], test_y[threes]) == 0


@pytest.mark.full  # a training; what the loss is stands in test_distillation.py
def test_a_small_student_without_labels(digits, teacher):
    x, y, test_x, test_y = digits
    with torch.no_grad():
        said = teacher(x)
    config = DivergenceConfig(temperature=4.0)
    student = trained(
        network(64, 16, 10, seed=2),
        x,
        lambda z, i: logits_divergence(z, said[i], config=config),
        steps=800,
    )
    few = torch.arange(60)
    alone = trained(
        network(64, 16, 10, seed=2), x[few], lambda z, i: CROSS_ENTROPY(z, y[few][i]), steps=800
    )
    assert accuracy(student, test_x, test_y) >= 0.95
    assert accuracy(alone, test_x, test_y) < 0.9
