"""The scripts of examples/ run on the ranks that they state, and their models learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.grids import full
from tests.project.documents import ROOT, Program, Ranks

pytestmark = pytest.mark.cpu_only

LOSS = re.compile(r"loss (\d+\.\d+)")
TORCHRUN = re.compile(r"^    torchrun --standalone --nproc-per-node (\d) examples/(\w+)\.py", re.M)
MAX_LINES = 60
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
STEP = "    loss = trainer.step("


@pytest.fixture(scope="module")
def ranks():
    for needed in ("transformers", "accelerate", "peft"):
        pytest.importorskip(needed)
    made = Ranks(4)
    yield made
    made.close()


def program(name: str, size: int) -> Program:
    """The script without arguments: those of pytest are not its own."""
    source = (ROOT / "examples" / f"{name}.py").read_text()
    return Program(name, "import sys\nsys.argv[1:] = []\n" + source, size, "")


def losses(ranks: Ranks, script: Program, folder: Path) -> list[float]:
    """What rank 0 printed of losses; no rank failed, and no other printed any."""
    (printed, _), *others = outcomes = ranks.run(script, folder)
    assert [error for _, error in outcomes if error is not None] == []
    assert not any(LOSS.search(other) for other, _ in others)
    return [float(found) for found in LOSS.findall(printed)]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_states_its_command(path):
    source = path.read_text()
    assert len(source.splitlines()) < MAX_LINES + 1
    command = TORCHRUN.search(source)
    assert command is not None
    assert command[2] == path.stem


# `make docs` runs what is marked full; tests/hf has the Trainer and PEFT over ranks in the suite.
@pytest.mark.parametrize(
    "name", ["ddp_hook", full("peft_lora"), full("trainer"), full("zero3_finetune")]
)
def test_a_model_learns_on_two_ranks(name, ranks, tmp_path):
    first, *_, last = losses(ranks, program(name, 2), tmp_path)
    assert last < 0.9 * first


@pytest.mark.parametrize("sizes", [full((1,)), full((4, 1))], ids=["one", "four and one"])
def test_a_folder_is_tuned_alike_on_four_ranks_and_on_one(ranks, tmp_path, sizes):
    found = []
    for size in sizes:
        (folder := tmp_path / str(size)).mkdir()
        before, after, by_transformers = losses(ranks, program("finetune_3d", size), folder)
        assert after < 0.7 * before
        assert abs(by_transformers - after) < 1e-4
        found.append((before, after))
    assert all(
        abs(each - first) < 1e-4
        for losses_of_size in found[1:]
        for each, first in zip(losses_of_size, found[0], strict=True)
    )


@pytest.mark.full  # three runs; tests/train resumes runs on other numbers of ranks in the suite
def test_a_run_that_was_killed_goes_on_from_its_checkpoint(ranks, tmp_path):
    """On another number of ranks, to the loss of a run that never stopped."""
    for each in ("killed", "whole"):
        (tmp_path / each).mkdir()
    pretrain = program("pretrain", 2)
    assert pretrain.source.count(STEP) == 1
    dies = f"    if trainer.num_steps == 15:\n        raise KeyboardInterrupt\n{STEP}"
    killed = Program("killed", pretrain.source.replace(STEP, dies), 2, "")
    outcomes = ranks.run(killed, tmp_path / "killed")
    assert all("KeyboardInterrupt" in (error or "") for _, error in outcomes)

    printed, error = ranks.run(program("pretrain", 1), tmp_path / "killed")[0]
    assert error is None
    assert "goes on after step 10\n" in printed
    assert "step  20 loss" in printed
    assert "step   1 loss" not in printed
    whole = losses(ranks, pretrain, tmp_path / "whole")
    assert whole[-1] < 0.7 * whole[0]
    assert abs(float(LOSS.findall(printed)[-1]) - whole[-1]) < 2e-3
