"""A deterministic run on a GPU says at its start when the process has bound itself to other
products already."""

from __future__ import annotations

import os

import pytest
import torch

from pyops.config import ConfigError
from pyops.train.host.ranks import fix_products

pytestmark = pytest.mark.cpu_only

CPU = torch.device("cpu")


def test_products_are_tried_in_deterministic_mode_with_the_workspace_chosen(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    found = []
    monkeypatch.setattr(
        torch,
        "mm",
        lambda *_: found.append(
            (os.environ["CUBLAS_WORKSPACE_CONFIG"], torch.are_deterministic_algorithms_enabled())
        ),
    )
    fix_products(CPU)
    assert found == [(":4096:8", True)]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_product_before_the_run_is_said_with_what_to_set(monkeypatch):
    def refuse(*_):
        raise RuntimeError(
            "Deterministic behavior was enabled ... you must set "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 ..."
        )

    monkeypatch.setattr(torch, "mm", refuse)
    with pytest.raises(
        ConfigError,
        match=r"CUBLAS_WORKSPACE_CONFIG=:4096:8 before the first .*before Python starts",
    ):
        fix_products(CPU)
    assert not torch.are_deterministic_algorithms_enabled()


def test_another_error_is_not_taken_for_it(monkeypatch):
    def refuse(*_):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "mm", refuse)
    with pytest.raises(RuntimeError, match="out of memory"):
        fix_products(CPU)
