"""A configuration is right, or refused with the key, the value and the fix."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from pyops.config import Config, ConfigError, OptimizerConfig, load_config
from pyops.config.reading import RENAMED

pytestmark = pytest.mark.cpu_only

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.toml"))


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "c.toml").write_text(text)
    return tmp_path / "c.toml"


def test_what_is_not_said_is_the_default(tmp_path):
    config = load_config(write(tmp_path, "[model]\ndim = 64\n[optimizer]\nlr = 1\n"))
    assert config.model.dim == 64
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.train == Config().train


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_the_examples_are_valid(path):
    assert load_config(path).name == path.stem
    load_config(path).check_ranks(2)


def test_overrides(tmp_path):
    path = write(tmp_path, "[train]\nnum_steps = 5\n")
    config = load_config(
        path,
        overrides=[
            "train.num_steps=7",
            "optimizer.lr = 1e-4",
            "data.path=/some/where",
            "name=x",
            'data.suffixes=[".md"]',
        ],
    )
    assert (config.train.num_steps, config.optimizer.lr, config.data.path, config.name) == (
        7,
        1e-4,
        "/some/where",
        "x",
    )
    assert config.data.suffixes == (".md",)
    assert config.folder == Path("runs/x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstpes = 5", r"unknown key train.stpes = 5; did you mean train.num_steps\?"),
        ("[trian]\nsteps = 5", r"unknown key trian = .*; did you mean train\?"),
        ("[train]\nzzz = 5", r"unknown key train.zzz = 5; there are train.num_steps, train.batch"),
        ("[train]\nnum_steps = 'many'", r"train.num_steps is 'many'; it must be a whole number"),
        ("[train]\nnum_steps = 1.5", r"train.num_steps is 1.5; it must be a whole number"),
        ("[train]\nnum_steps = true", r"train.num_steps is True; it must be a whole number"),
        ("[train]\ncompile = 1", r"train.compile is 1; it must be true or false"),
        ("[optimizer]\nlr = '1e-3'", r"optimizer.lr is '1e-3'; it must be a number"),
        (
            "[optimizer]\nlr = 9007199254740993",
            r"optimizer.lr is 9007199254740993, which .* rounds to 9007199254740992",
        ),
        ("[optimizer]\nlr = nan", r"optimizer.lr is nan; it must be a number"),
        ("[data]\nsuffixes = '.py'", r"data.suffixes is '.py'; it must be a list of texts"),
        ("name = 3", r"name is 3; it must be a text in quotes"),
        ("name = 'a/b'", r"name is 'a/b'; it becomes a folder"),
        ("[train]\nbucket_bytes = 0", r"train.bucket_bytes is 0; it must be 1 or more"),
        (
            "[optimizer]\nname = 'onebit_adam'\n[communication]\ncodec = 'power_sgd'",
            r"communication.codec is 'power_sgd', which needs matrices; .* 'onebit_adam' "
            r"travel as one flat tensor: "
            "set communication.codec to onebit or int8",
        ),
        (
            "[communication]\ncodec = 'int7'",
            r"^communication.codec is 'int7'; choose one of none, .*int8, .*power_sgd$",
        ),
        (
            "[communication]\ncodec = 'int8'\n[zero]\nstage = 1",
            r"'int8': set communication.codec to \"none\", or zero.stage to 0$",
        ),
        (
            "[communication]\ncodec = 'int8'\n[parallel]\ntp = 2",
            r"'int8': set communication.codec to .*, or parallel.tp to 1$",
        ),
        (
            "[optimizer]\nname = 'onebit_adam'\n[parallel]\npp = 2",
            r"set parallel.pp to 1, or optimizer.name to adamw, say$",
        ),
        ("model = 3", r"model is 3; it is a section: write \[model\]"),
        ("[train]\nnum_steps = 0", r"train.num_steps is 0; it must be 1 or more"),
        (
            "[precision]\ndtype = 'fp8'",
            r"precision.dtype is 'fp8'; it must be one of fp32, bf16, fp16",
        ),
        ("[train]\nalgorithm = 'fast'", r"train.algorithm is 'fast'; it must be auto, native"),
        ("[optimizer]\nlr = 0", r"optimizer.lr is 0.0; it must be more than 0"),
        (
            "[optimizer]\nbeta2 = 1",
            r"optimizer.beta2 is 1.0; it must be 0 or more, and less than 1",
        ),
        (
            "[optimizer]\nname = 'adamw8'",
            r"optimizer.name is 'adamw8'; it must be one of adamw, adam, sgd, .*onebit_adam",
        ),
        (
            "[optimizer]\nnmae = 'sgd'",
            r"unknown key optimizer.nmae = 'sgd'; did you mean optimizer.name\?",
        ),
        (
            "[optimizer]\ncompression_warmup_steps = 0",
            r"compression_warmup_steps is 0; it must be 1 or more, or \"auto\"",
        ),
        (
            "[optimizer]\ncompression_warmup_steps = 'soon'",
            r"compression_warmup_steps is 'soon'; it must be 1 or more",
        ),
        (
            "[optimizer]\ncompression_warmup_steps = 1.5",
            r"is 1.5; it must be a whole number or a text in quotes",
        ),
        ("[communication]\ncodec = 3", r"communication.codec is 3; it must be a text in quotes"),
        (
            "[model]\ndim = 10\nnum_heads = 4",
            r"model.dim is 10, which num_heads = 4 does not divide",
        ),
        (
            "[model]\nvocab_size = 100",
            r"model.vocab_size is 100; data.tokenizer 'bytes' has 256 tokens: set 256",
        ),
        ("[data]\nvalidation_fraction = 2", r"data.validation_fraction is 2.0"),
        ("[train\nsteps = 5", r"c.toml is no TOML: .*line 1.*correct it there"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_the_optimizer_and_its_compression(tmp_path):
    plain = load_config(write(tmp_path, ""))
    assert (plain.optimizer.name, plain.communication.codec, plain.optimizer.communicates) == (
        "adamw",
        "none",
        False,
    )
    text = "[optimizer]\nname = 'onebit_adam'\ncompression_warmup_steps = "
    assert load_config(write(tmp_path, f"{text}400")).optimizer.compression_warmup_steps == 400
    auto = load_config(write(tmp_path, f"{text}'auto'")).optimizer
    assert (auto.compression_warmup_steps, auto.communicates) == ("auto", True)


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"config .*none.toml can't be read: No such file"):
        load_config(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.num_steps",
            r"--set train.num_steps is no assignment; write --set section.key=value",
        ),
        ("=5", "is no assignment"),
        ("train.num_steps=x", r"train.num_steps is 'x'; it must be a whole number"),
        ("name.x=5", r"--set name.x=5: name is a value, not a section"),
        ("train.stps=5", r"unknown key train.stps = 5; did you mean train.num_steps"),
    ],
)
def test_a_bad_override(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, 'name = "n"'), overrides=[override])


def test_ranks_share_a_batch(tmp_path):
    config = load_config(write(tmp_path, "[train]\nbatch = 12\nmicro_batch = 3"))
    config.check_ranks(1)
    config.check_ranks(4)
    with pytest.raises(
        ConfigError, match=r"train.batch is 12 sequences, which 5 ranks can't share; .*such as 10"
    ):
        config.check_ranks(5)
    with pytest.raises(
        ConfigError, match=r"train.micro_batch is 3, which does not divide a rank's 2 sequences"
    ):
        config.check_ranks(6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            0.8,
            "optimizer.layer_decay is 0.8, which a run over text in which nothing is "
            "frozen has not; set it to 1",
        ),
        (0.0, "layer_decay is 0.0; it must be more than 0, up to 1"),
        (1.5, "layer_decay is 1.5; it must be more than 0, up to 1"),
    ],
)
def test_a_layer_decay_that_cannot_be_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        Config(optimizer=OptimizerConfig(layer_decay=value))


def test_the_learning_rates_way():
    config = OptimizerConfig(lr=2.0, warmup_steps=4, final_lr_ratio=0.25)
    way = [config.lr_at(step, num_steps=12) for step in range(12)]
    assert way[:4] == [0.5, 1.0, 1.5, 2.0]
    assert way[4] == 2.0
    assert way[8] == pytest.approx(1.25)  # half way down
    assert way == sorted(way[:4]) + sorted(way[4:], reverse=True)
    assert config.lr_at(12, num_steps=12) == pytest.approx(0.5)
    assert OptimizerConfig(lr=2.0, warmup_steps=0).lr_at(0, num_steps=1) == 2.0


def test_rows_of_documents_are_of_runs_over_text(tmp_path):
    packing = '[data]\npacking = "documents"\n'
    assert load_config(write(tmp_path, packing)).data.packing == "documents"
    path = write(tmp_path, packing + '[elastic]\nfreeze = "schedule"\n[model]\ntied_head = false\n')
    with pytest.raises(ConfigError, match=r"data.packing is 'documents', which .*set data.packing"):
        load_config(path)


def test_patterns_of_attention(tmp_path):
    text = '[model]\npattern = "BigBird(seed=2) | Longformer"\npattern_block = 32\n'
    model = load_config(write(tmp_path, text)).model
    assert model.pattern.startswith("BigBird(num_random_blocks=1,")
    assert model.pattern_block == 32
    with pytest.raises(ConfigError, match=r"model.pattern has 'Bigbird', which is no pattern; did"):
        load_config(write(tmp_path, '[model]\npattern = "Bigbird"\n'))


def test_every_refusal_of_a_section_begins_with_a_key():
    """The reader puts the section's name before it: what is left must be something that can be
    typed."""
    sections = {
        f.name: typing.get_type_hints(Config)[f.name]
        for f in dataclasses.fields(Config)
        if f.name != "name"
    }
    wrong = {int: (-1, 2**70), float: (-1.0, 1e300), str: ("nonsense",), bool: ()}
    found: list[tuple[str, list[str], str]] = []
    for section, kind in sections.items():
        for field in dataclasses.fields(kind):
            for value in wrong.get(typing.get_type_hints(kind)[field.name], ()):
                try:
                    kind(**{field.name: value})
                except ValueError as error:
                    found.append((section, [f.name for f in dataclasses.fields(kind)], str(error)))
                except OverflowError:
                    pass  # a size that nothing holds: not a matter of words
    assert len(found) > 60
    assert not [
        (section, text)
        for section, keys, text in found
        if text.split(" ")[0].rstrip(",") not in keys
    ]


@pytest.mark.parametrize(
    ("old", "new"), [("train.steps", "train.num_steps"), ("parallel.micro_batches", "num_micro")]
)
def test_a_renamed_key_names_the_new_one(tmp_path, old, new):
    path = tmp_path / "config.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match=rf"{old} = 3 has a new name: .*{new}"):
        load_config(path, overrides=[f"{old}=3"])


def test_every_renamed_key_has_its_new_name():
    for old, text in RENAMED.items():
        new = text.partition(",")[0]
        section, field = new.split(".")
        assert hasattr(getattr(Config(), section), field), new
        assert not hasattr(getattr(Config(), section), old.split(".")[1]), old
