"""Tasks that can't be made: sections that do not fit, and packages, fonts and passages that are not
there."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from pyops.config import ConfigError
from pyops.data import CorpusError, DataConfig, load_characters, load_digits
from pyops.data.passages import prepare_passages
from pyops.models import GPTConfig
from pyops.train.tasks import make_task
from tests.train.tiny_tasks import config_of

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The passages are cut once."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "digits",
            {"vit": {"image_size": 16}},
            "vit.image_size is 16, but task.kind is 'digits': set it to 8",
        ),
        ("digits", {"vit": {"num_labels": 4}}, "vit.num_labels is 4, .* set it to 10"),
        ("characters", {"vit": {"num_labels": 10}}, "vit.num_labels is 10, .* set it to 62"),
        ("passages", {"bert": {"vocab_size": 257}}, "bert.vocab_size is 257; .* need 258 or more"),
        (
            "masked_text",
            {"bert": {"tied_head": True}},
            "bert.tied_head is true, but .* set it to false",
        ),
        (
            "masked_text",
            {"bert": {"pooled_head": True}},
            "bert.pooled_head is true, but .* set it to false",
        ),
        (
            "passages",
            {"data": {"path": "/tmp"}},
            'data.path is .*/tmp.*, but .* set it to "stdlib"',
        ),
        ("text", {"task": {"kind": "poems"}}, "kind is 'poems'; it must be one of text, digits"),
        ("text", {"task": {"num_epochs": -1}}, "num_epochs is -1; it must be 0 or more"),
        ("digits", {"task": {"num_copies": 0}}, "num_copies is 0; it must be 1 or more"),
        (
            "text",
            {"task": {"num_copies": 2}},
            "task.num_copies is 2, but task.kind is 'text', .* set it to 1",
        ),
        (
            "passages",
            {"task": {"num_copies": 4096}},
            "task.num_copies is 4096, but bert.sequence_length is .* set it to that or less",
        ),
    ],
)
def test_sections_that_do_not_fit_are_refused(cache, kind, change, message):
    config = config_of(cache, kind)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(
            config,
            **{
                name: dataclasses.replace(getattr(config, name), **to)
                for name, to in change.items()
            },
        )


def test_a_tied_head_is_refused(cache):
    config = config_of(cache, "text")
    with pytest.raises(
        ConfigError, match=r"model.tied_head is true: .* set model.tied_head to false"
    ):
        make_task(
            dataclasses.replace(config, model=dataclasses.replace(config.model, tied_head=True))
        )


def test_a_pipeline_of_a_task_counts_the_blocks_of_its_own_model(cache):
    config = config_of(cache, "digits")
    parallel = dataclasses.replace(config.parallel, pp=6)
    with pytest.raises(ValueError, match=r"3 blocks, head\); set vit.num_layers to 4 or more"):
        dataclasses.replace(config, parallel=parallel, model=GPTConfig(num_layers=12))


def test_a_part_that_leaves_a_family_without_passages_is_refused(tmp_path):
    with pytest.raises(
        CorpusError,
        match=r"asyncio has no passage in the held_out part.*set data.validation_fraction to "
        r"another part",
    ):
        prepare_passages(
            DataConfig(cache=str(tmp_path), validation_fraction=1e-6), vocab_size=258, length=32
        )
    with pytest.raises(
        CorpusError,
        match=r"data.max_bytes is 30, too little text for a row of 32 tokens; set it to more",
    ):
        prepare_passages(
            DataConfig(cache=str(tmp_path), max_bytes=30, validation_fraction=0.4),
            vocab_size=258,
            length=32,
        )
    assert not list(tmp_path.glob("passages-*"))


def test_without_scikit_learn_the_digits_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(CorpusError, match="pip install scikit-learn"):
        load_digits()


def test_a_font_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("pyops.data.characters.FONTS", ("cmr10", "none"))
    with pytest.raises(
        CorpusError,
        match=r"the font none.ttf can't be read from .*; install matplotlib and pillow again",
    ):
        load_characters()


@pytest.mark.parametrize("package", ["matplotlib", "PIL"])
def test_without_a_package_the_characters_say_what_to_install(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CorpusError, match=f"{package} is not installed: pip install matplotlib"):
        load_characters()
