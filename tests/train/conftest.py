"""Fixtures of the runs: one thread for tiny tensors, and runs that are trained once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

from pyops.config import Config
from pyops.train import train
from tests.train.tiny_run import train_on_rank
from tests.workers import Pool

Reference = Callable[..., Config]  # (config, ranks=1) -> the configuration of the trained run


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The tensors are small: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, world: Callable[[int], Pool]) -> Reference:
    """reference(config, ranks=1): the run of this configuration, trained once in this process.

    Runs that differ in name, folder and place of the text alone are one; their metrics and
    checkpoints are to be read only.
    """
    folder = tmp_path_factory.mktemp("reference")
    trained: dict[str, Config] = {}

    def get(config: Config, ranks: int = 1) -> Config:
        bare = dataclasses.replace(
            config,
            name="reference",
            data=dataclasses.replace(config.data, path="text", cache="cache"),
            train=dataclasses.replace(config.train, folder="runs"),
        )
        key = f"{ranks} {bare}"
        if key not in trained:
            made = dataclasses.replace(
                config,
                name=f"run-{len(trained)}",
                train=dataclasses.replace(config.train, folder=str(folder)),
            )
            if ranks == 1:
                train(made)
            else:
                world(ranks).run(train_on_rank, made)
            trained[key] = made
        return trained[key]

    return get
