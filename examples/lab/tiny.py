"""The model of the lab: a CoAtNet of 0.2 million parameters, and images for it."""

import torch

from pyops.models import CoAtNet, CoAtNetConfig


def make_model(norm="layer"):
    config = CoAtNetConfig(
        num_labels=10,
        image_size=32,
        num_channels=1,
        stem_width=16,
        depths=(1, 1, 2, 1),
        widths=(16, 32, 64, 96),
        head_dim=16,
        norm=norm,
    )
    return CoAtNet(config, seed=0)


def make_batch(count, step=0):
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(count, 1, 32, 32, generator=drawn), torch.arange(count) % 10
