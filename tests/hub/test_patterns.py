"""Folders of models with a sparse pattern of attention."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from pyops import hub
from pyops.models import GPT, T5, T5Config
from tests.hub.test_folders import LLAMA, tell

pytestmark = pytest.mark.cpu_only


def test_the_pattern_of_a_folder(tmp_path):
    """It is in config.json under a key of ours; another folder's is not taken over with `like`."""
    hub.save(GPT(replace(LLAMA, pattern="BigBird", pattern_block=16)), tmp_path / "sparse")
    found = json.loads((tmp_path / "sparse" / "config.json").read_text())
    assert found["pyops_pattern"].startswith("BigBird(")
    assert found["pyops_pattern_block"] == 16
    hub.save(GPT(LLAMA), tmp_path / "dense", like=tmp_path / "sparse")
    assert not hub.load(tmp_path / "dense").config.pattern
    assert hub.load(tmp_path / "dense", pattern="Fixed").config.pattern.startswith("Fixed(")
    for value, words in (
        (7, "pyops_pattern = '7'; it must be a text of a pattern"),
        ("Bigbird", "makes no model: pattern has 'Bigbird'"),
        ("Longformer(global_block_indices=(9,))", "global block 9 of a length with 1 blocks"),
    ):
        tell(tmp_path / "sparse", pyops_pattern=value)
        with pytest.raises(hub.HubError, match=re.escape(words)):
            hub.load(tmp_path / "sparse")
    hub.save(T5(T5Config(vocab_size=20, num_layers=1, num_heads=2, dim=8)), tmp_path / "t5")
    tell(tmp_path / "t5", pyops_pattern="Dense")
    with pytest.raises(hub.HubError, match="of a GPT or a BERT: take it out"):
        hub.load(tmp_path / "t5")
    tell(tmp_path / "t5", pyops_pattern=None, relative_attention_max_distance=16)
    with pytest.raises(hub.HubError, match="max_distance is 16; it must be more than num_buckets"):
        hub.load(tmp_path / "t5")
