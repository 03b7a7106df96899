"""What torch.compile traces of patterns: layouts of new lengths, and masks of transformers. A whole
model is compiled in test_apply.py."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from pyops.attention import BigBird, BlockLayout, PatternLayouts
from pyops.attention.applied import mask_functions

pytestmark = pytest.mark.cpu_only


def test_a_layout_is_made_while_a_program_is_traced():
    """Of any new length, the second of which torch would make a symbol of; also by a copy."""
    layouts = PatternLayouts(BigBird(seed=2), heads=2, block=16, causal=True)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(layouts)))
    assert copied == layouts
    assert copied.number != layouts.number

    def tables(layout: BlockLayout) -> list[Tensor]:
        return [
            getattr(layout, side + name) + 0
            for side in ("", "column_")
            for name in ("counts", "indices", "full")
        ]

    traced = torch.compile(
        lambda x: tables(copied.of(x.shape[0], x.device)), fullgraph=True, backend="eager"
    )
    for length in (70, 90):
        found, wanted = traced(torch.zeros(length)), tables(layouts.build(length))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert not copied.kept


def packed(lengths: tuple[tuple[int, ...], ...]) -> Callable[..., Tensor]:
    """transformers' mask function of rows of packed sequences."""
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = masking_utils.find_packed_sequence_indices(places)
    causal = masking_utils.remap_positions_for_packed_sequence(
        masking_utils.causal_mask_function, places
    )
    return masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(ids))


def test_documents_are_asked_of_a_mask_function():
    function = packed(((3, 1, 5), (9,), (1, 8), (7, 2)))
    found = mask_functions._traced_documents(function, (4, 9, 9), None)
    assert torch.equal(found, mask_functions._documents(function))
    plain = masking_utils.causal_mask_function
    assert mask_functions._traced_documents(plain, (4, 9, 9), None) is None


def test_another_rule_is_refused():
    window = masking_utils.sliding_window_overlay(3)
    both = masking_utils.and_masks(window, masking_utils.causal_mask_function)
    with pytest.raises(RuntimeError, match="not that of packed sequences alone"):
        mask_functions._traced_documents(both, (1, 9, 9), None)
    for function, sizes in ((masking_utils.or_masks(both, both), (1, 9, 9)), (both, (1, 2, 9))):
        with pytest.raises(ValueError, match=r"the model masks by (or|and)_masks"):
            mask_functions._traced_documents(function, sizes, None)
