"""What few bits cost models of images of digits and of source text, and what training, GPTQ, AWQ
and SmoothQuant win back: the acceptance of `pyops.quantized`, for a bench and for tests.

    digits   MLP 64-256-128-10, weights symmetric by rows, inputs 8 bits by tokens
    text     a GPT on the bytes of the standard library's sources: loss in nats per byte
"""

from __future__ import annotations

import copy
import itertools
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyops.models import GPT, GPTConfig
from pyops.optim import AdamW
from pyops.quantized import Int4, Int8, IntN, Scheme
from pyops.quantized.calibration import awq, gptq, smooth
from pyops.quantized.calibration.activation_aware import Moments, rounding_error
from pyops.quantized.calibration.inputs import run
from pyops.quantized.calibration.readers import fold, readers_of_norms
from pyops.quantized.formats import Format
from pyops.quantized.layers import chosen, matrix
from pyops.quantized.training import aware

__all__ = [
    "OUTLIERS",
    "Digits",
    "Text",
    "accuracy",
    "digits_mlp",
    "example_gpt",
    "layers_error",
    "rounded_accuracy",
    "rounded_loss",
    "text_losses",
    "trained_aware",
    "with_outliers",
]

OUTLIERS = (50, 200)
"""How many times larger a channel is made; one of average size is then some ten, and some forty,
times the largest other number of its token."""


@dataclass(frozen=True)
class Digits:
    """Images [n, 64] and labels [n], to train on and held out."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls) -> Digits:
        """Those of scikit-learn."""
        from pyops.data.digits import load_digits

        own, held_out = load_digits()
        return cls(own.images.flatten(1), own.labels, held_out.images.flatten(1), held_out.labels)


def _train_digits(
    model: nn.Module,
    digits: Digits,
    steps: Iterable[nn.Parameter] = (),
    *,
    epochs: int,
    lr: float,
    seed: int,
    falls: bool = False,
) -> None:
    """Epochs of AdamW at `lr`, which falls to 0 in a straight line if it `falls`."""
    model.train()
    optimizer = AdamW([*model.parameters(), *steps], lr=lr, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        batches = torch.randperm(len(digits.labels), generator=generator).split(64)
        for number, drawn in enumerate(batches):
            if falls:
                for group in optimizer.param_groups:
                    group["lr"] = lr * (1 - (epoch + number / len(batches)) / epochs)
            optimizer.zero_grad()
            logits = model(digits.images[drawn])
            nn.functional.cross_entropy(logits, digits.labels[drawn]).backward()
            optimizer.step()
    model.eval()


def digits_mlp(digits: Digits, *, seed: int, epochs: int = 40) -> nn.Sequential:
    """The teacher's shape, trained in floating point."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise((64, 256, 128, 10)):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    _train_digits(model, digits, epochs=epochs, lr=3e-3, seed=seed)
    return model


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Percent of the held out images."""
    said = model(digits.test_images).argmax(1)
    return 100 * float((said == digits.test_labels).double().mean())


def bits_scheme(bits: int) -> Scheme:
    """Weights of so many bits by rows, inputs of 8 by tokens."""
    return Scheme(IntN(bits), Int8(per="token"))


def rounded_accuracy(model: nn.Module, digits: Digits, bits: int) -> float:
    """That of the model rounded to nearest."""
    with aware(model, bits_scheme(bits)):
        return accuracy(model, digits)


def trained_aware(
    model: nn.Module, digits: Digits, bits: int, *, seed: int, learn_steps: bool = False
) -> float:
    """The accuracy after 15 epochs of training with quantization in mind, of a copy; the rate falls
    to 0, so that weights come to rest on their codes."""
    model = copy.deepcopy(model)
    with aware(model, bits_scheme(bits), learn_steps=learn_steps) as training:
        _train_digits(
            model, digits, training.parameters(), epochs=15, lr=1e-3, seed=seed, falls=True
        )
        return accuracy(model, digits)


@dataclass(frozen=True)
class Text:
    """Rows of bytes [n, length + 1] int64."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def load(cls, length: int, *, rows: int, held_out: int) -> Text:
        """Files of the standard library, of which every eighth is held out; rows evenly spread over
        all of them."""
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py"))
        parts = []
        for own, most in (
            ([f for i, f in enumerate(files) if i % 8], rows),
            (files[::8], held_out),
        ):
            read = b"".join(file.read_bytes() for file in own)
            flat = torch.frombuffer(bytearray(read), dtype=torch.uint8).long()
            flat = flat[: len(flat) // (length + 1) * (length + 1)]
            found = flat.view(-1, length + 1)
            parts.append(found[torch.linspace(0, len(found) - 1, min(most, len(found))).long()])
        return cls(*parts)


def example_gpt(config: GPTConfig, text: Text, *, steps: int, batch: int) -> GPT:
    """A GPT trained on rows in a drawn order."""
    model = GPT(config)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        rows = text.train[torch.randint(len(text.train), (batch,), generator=generator)]
        optimizer.zero_grad()
        model.loss(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def loss_of(model: GPT, text: Text) -> float:
    """Nats per byte of the rows held out."""
    total = sum(float(model.loss(r[:, :-1], r[:, 1:])) * len(r) for r in text.held_out.split(32))
    return total / len(text.held_out)


def rounded_loss(model: GPT, text: Text, scheme: Scheme) -> float:
    """That of the model rounded to nearest."""
    with aware(model, scheme):
        return loss_of(model, text)


def with_outliers(model: GPT, *, times: float, channel: int = 3) -> GPT:
    """A copy that computes the same, in which every norm's result has a channel that is `times`
    larger, and its readers' weights for it as much smaller."""
    model = copy.deepcopy(model)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for entry in readers_of_norms(model, tokens, chosen(model, None)):
        scale = torch.ones(model.config.dim)
        scale[channel] = 1 / times
        fold(entry, scale)
    return model


@torch.no_grad()
def layers_error(model: GPT, batches: list[Tensor], format: Format) -> float:
    """What rounding to nearest costs the layers themselves: |Q(W) X - W X|^2 / |W X|^2, summed over
    them. Unlike the model's loss it does not depend on where the errors of one rounding point.

    Args:
        model: in evaluation mode.
        batches: tokens.
        format: of the weights.
    """
    moments: dict[str, Moments] = {}
    layers = chosen(model, None)
    run(model, batches, layers, lambda n, x: moments.setdefault(n, Moments.empty(x)).add(x))
    total = 0.0
    for name, layer in layers.items():
        weight, products = matrix(layer), moments[name].products
        wide = weight.double()
        plain = torch.ones(weight.shape[1])
        error = rounding_error(weight, plain, products, format)
        total += error / float((wide @ products * wide).sum())
    return total


def text_losses(
    model: GPT, text: Text, format: Format, *, examples: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Nats per byte of the model in floating point, in int8, with weights of `format` by every
    method, and with outliers in int8; and the seconds that methods took.

    Args:
        model: trained.
        text: what it was trained on.
        format: of the weights of the later ones.
        examples: rows that calibrate.
    """
    tokens = [rows[:, :-1] for rows in text.train[:examples].split(8)]
    int8, seconds = Scheme(Int8(), Int8(per="token")), {}
    found = {"float": loss_of(model, text), "int8": rounded_loss(model, text, int8)}
    found["nearest"] = rounded_loss(model, text, Scheme(format))
    scaled, start = copy.deepcopy(model), time.perf_counter()
    awq(scaled, format, tokens)
    seconds["awq"] = time.perf_counter() - start
    found["awq"] = rounded_loss(scaled, text, Scheme(format))
    for name, before in (("gptq", model), ("awq, gptq", scaled)):
        made, start = copy.deepcopy(before), time.perf_counter()
        gptq(made, format, tokens)
        seconds[name] = time.perf_counter() - start
        found[name] = loss_of(made, text)
    for times in OUTLIERS:
        name = f"outlier of {times}"
        outlier = with_outliers(model, times=times)
        found[name] = rounded_loss(outlier, text, int8)
        start = time.perf_counter()
        smooth(outlier, tokens)
        seconds[f"{name}, smooth"] = time.perf_counter() - start
        found[f"{name}, smooth"] = rounded_loss(outlier, text, int8)
    return found, seconds


LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "bias": False,
}
SMALL = GPTConfig(
    vocab_size=256,
    sequence_length=64,
    num_layers=2,
    num_heads=2,
    dim=64,
    hidden=128,
    **LLAMA,
)
"""A GPT for tests."""
EXAMPLE = GPTConfig(
    vocab_size=256,
    sequence_length=256,
    num_layers=4,
    num_heads=4,
    dim=192,
    **LLAMA,
)
"""The model of examples/gpt_small.toml."""
GROUP_64 = Int4(group=64)
