"""What a save leaves behind when it fails, and what it replaces."""

from __future__ import annotations

from typing import Any

import pytest

from pyops import hub
from pyops.models import GPT
from tests.hub.test_folders import LLAMA, same

pytestmark = pytest.mark.cpu_only


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyops.hub.folder_saving.write_tensors", fail)
    with pytest.raises(
        hub.HubError, match=r"m can't be written: No space left on device; make room"
    ):
        hub.save(GPT(LLAMA, seed=1), tmp_path / "m")
    assert not list(tmp_path.glob("m*"))


def test_a_folder_of_an_earlier_save_is_replaced_and_nothing_else(tmp_path, monkeypatch):
    """Whole: a save that is killed between two renames leaves the earlier one, and it is read."""
    hub.save(GPT(LLAMA, seed=1), tmp_path / "m", max_file_bytes=1500)
    hub.save(GPT(LLAMA, seed=2), tmp_path / "m")
    assert same(hub.load(tmp_path / "m"), GPT(LLAMA, seed=2))
    assert sorted(p.name for p in tmp_path.glob("m*/*")) == ["config.json", "model.safetensors"]
    (tmp_path / "empty").mkdir()
    hub.save(GPT(LLAMA, seed=1), tmp_path / "empty")
    for name in ("tokenizer.json", "notes"):
        (tmp_path / "m" / name).write_text("mine")
        with pytest.raises(
            hub.HubError, match=f"is there already and holds {name}; a save replaces"
        ):
            hub.save(GPT(LLAMA, seed=3), tmp_path / "m")
        assert (tmp_path / "m" / name).read_text() == "mine"
        (tmp_path / "m" / name).unlink()
    (tmp_path / "m" / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(hub.HubError, match=r"has no config\.json"):
        hub.save(GPT(LLAMA, seed=3), tmp_path / "m")
    (tmp_path / "config.json").rename(tmp_path / "m" / "config.json")
    (tmp_path / "m").rename(tmp_path / "m.old")
    assert same(hub.load(tmp_path / "m"), GPT(LLAMA, seed=2))
