"""[healing]: which runs take it, by key and value, from Python and from TOML alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyops.cli import main
from pyops.config import Config, ConfigError, HealingConfig, load_config

pytestmark = pytest.mark.cpu_only

DIGITS = """
[task]
kind = "digits"
[vit]
image_size = 8
patch_size = 4
num_channels = 1
num_labels = 10
"""
ON = "[healing]\ncopy_every = 4\n"


def test_the_section_says_the_same_in_python_and_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"{ON}lease = 2.0\n[train]\ndevice = 'cpu'\n[zero]\nstage = 1\n")
    healing = load_config(path).healing
    assert healing == HealingConfig(copy_every=4, lease=2.0)
    quorum = healing.quorum(3)
    assert (quorum.min_replicas, quorum.start_replicas, quorum.lease) == (3, 3, 2.0)
    assert not Config().healing.on


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        ("[zero]\nstage = 2\n", "zero.stage is 2"),
        ('[zero]\nstage = 1\noffload = "cpu"\n', "zero.offload is 'cpu'"),
        ("[parallel]\ntp = 2\n", "parallel.tp is 2; set parallel.tp to 1"),
        ("[parallel]\npp = 2\n", "parallel.pp is 2; set parallel.pp to 1"),
        ("[parallel]\ncp = 2\n", "parallel.cp is 2; set parallel.cp to 1"),
        ("[parallel]\nadapt = true\n", "parallel.adapt is True; set parallel.adapt to false"),
        ('[communication]\ncodec = "int8"\n', "communication.codec is 'int8'"),
        ('[optimizer]\nname = "onebit_adam"\n', "optimizer.name is 'onebit_adam'"),
        ('[asynchronous]\nmethod = "local_sgd"\n', "asynchronous.method is 'local_sgd'"),
        (DIGITS, "leave out task.kind"),
        ('[elastic]\nfreeze = "percentile"\n[model]\ntied_head = false\n', "leave out task.kind"),
        ("[train]\nmemory_checkpoint_every = 5\n", "train.memory_checkpoint_every is 5"),
        ('[train]\ndevice = "cuda"\n', 'train.device is "cuda"'),
    ],
)
def test_what_cannot_be_healed_is_refused(tmp_path: Path, beside: str, named: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(beside)
    load_config(path)  # is as it should be without [healing]
    path.write_text(ON + beside)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "healing.copy_every is 4" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("copy_every = -1", "healing.copy_every is -1; it must be 0 or more"),
        ("lease = 0.0", "healing.lease is 0.0; give seconds"),
        ("timeout = 400.0", "healing.meeting_timeout is 300, timeout 400"),
    ],
)
def test_values_out_of_range(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[healing]\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("way", "named"), [(["--slurm"], "--slurm was given"), (["--nodes", "2"], "--nodes 2 was")]
)
def test_a_launcher_that_replaces_no_rank_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: list[str], named: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(ON)
    assert main(["launch", str(path), *way, "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "healing.copy_every is 4" in told
    assert named in told


def test_a_dry_run_shows_the_command_of_a_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(ON)
    assert main(["launch", str(path), "--ranks-per-node", "2", "--resume", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"python -m pyops train {path} --resume    # 2 times")
