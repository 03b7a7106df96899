"""Each stage of a run is measured as its own folder says, and what lies beside the folder out stays
as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyops import hub
from pyops.compress import Spread, compress, run
from pyops.compress.measuring import Score
from pyops.compress.methods import Work, learned
from pyops.config import ConfigError
from tests.compress.tiny_folder import make_folder, model_of, run_of

pytestmark = pytest.mark.cpu_only

FINETUNE = {"method": "finetune", "num_steps": 2, "batch": 4, "lr": 5e-3}
HALVE = {"method": "distill", "keep": [1], "num_steps": 2, "batch": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("stages") / "gpt", num_layers=2)


def test_scores_and_times_are_of_the_model_of_their_stage(folder, monkeypatch):
    def score(model: Any, *_: Any, **__: Any) -> Score:
        return Score(model.config.num_layers, model.config.num_layers / 10, 7)

    def time_models(models: list[Any], *_: Any) -> list[tuple[Spread, Spread]]:
        times = [Spread.of([model.config.num_layers]) for model in models]
        return [(each, Spread.of([10 * each.median])) for each in times]

    monkeypatch.setattr(run, "score", score)
    monkeypatch.setattr(run, "time_models", time_models)
    report = compress(
        run_of(folder, "timed", FINETUNE, HALVE, measure={"rounds": 1, "batch": 3}), device="cpu"
    )
    assert [stage.loss for stage in report.stages] == [2, 2, 1]
    assert [stage.accuracy for stage in report.stages] == [0.2, 0.2, 0.1]
    assert report.num_tokens == 7
    assert [stage.token_ms.median for stage in report.stages if stage.token_ms] == [2, 2, 1]
    assert [stage.batch_ms.median for stage in report.stages if stage.batch_ms] == [20, 20, 10]
    assert report.batch_shape == (3, 32)
    assert report.num_threads == torch.get_num_threads()


def test_the_teacher_is_the_model_of_the_folder_in(folder, monkeypatch):
    """Whatever was done to the student before."""
    teachers: list[Any] = []
    genuine = learned.freeze
    monkeypatch.setattr(learned, "freeze", lambda t: teachers.append(t) or genuine(t))
    compress(run_of(folder, "taught", FINETUNE, HALVE), device="cpu")
    (teacher,) = teachers
    found = model_of(folder).state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in teacher.state_dict().items())


def halves(folder: Path) -> Path:
    """The same folder in bfloat16."""
    place = folder.with_name("halves")
    if not place.exists():
        hub.save(model_of(folder).to(torch.bfloat16), place, like=folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (place / name).write_bytes((folder / name).read_bytes())
    return place


@pytest.mark.parametrize(
    ("asked", "written"),
    [("", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)],
    ids=["as they were", "float16", "float32"],
)
def test_steps_compute_in_float32_whatever_is_written(folder, monkeypatch, asked, written):
    seen: list[set[torch.dtype]] = []
    genuine = run.apply_step

    def apply(work: Work, step: Any) -> None:
        seen.append({p.dtype for m in (work.model, work.teacher) for p in m.parameters()})
        genuine(work, step)

    monkeypatch.setattr(run, "apply_step", apply)
    name = f"of_{asked or 'halves'}"
    config = run_of(halves(folder), name, HALVE, FINETUNE, model={"dtype": asked})
    report = compress(config, device="cpu")
    assert seen == [{torch.float32}] * 2
    kinds = {w.dtype for w in load_file(Path(report.output) / "model.safetensors").values()}
    assert kinds == {written}
    sizes = [stage.tensor_bytes / stage.num_parameters for stage in report.stages]
    assert sizes == [2, written.itemsize, written.itemsize]


def test_files_of_several_dtypes_are_refused(folder):
    place = halves(folder).with_name("mixed")
    hub.save(model_of(folder), place, like=folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place / name).write_bytes((folder / name).read_bytes())
    weights = load_file(place / "model.safetensors")
    first = min(weights)
    weights[first] = weights[first].bfloat16()
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"hold \['torch.bfloat16', 'torch.float32'\]; write"):
        compress(run_of(place, "never", FINETUNE), device="cpu")


def test_what_a_run_that_was_killed_has_left_is_cleared(folder):
    rest = folder.with_name("killed.tmp")
    (rest / "1").mkdir(parents=True)
    (rest / "1" / "model.safetensors").write_bytes(b"half of it")
    report = compress(run_of(folder, "killed", FINETUNE), device="cpu")
    assert model_of(report.output) is not None
    assert not rest.exists()


def test_a_folder_that_appears_meanwhile_is_not_replaced(folder):
    """An empty one, which the operating system would replace."""
    place = folder.with_name("taken")
    with pytest.raises(ConfigError, match="taken is there already; name another"):
        compress(
            run_of(folder, "taken", FINETUNE),
            device="cpu",
            say=lambda _: place.mkdir(exist_ok=True),
        )
    assert list(place.iterdir()) == []
    assert not folder.with_name("taken.tmp").exists()


def counted_on_rank(rank: int, group: object, folder: Path) -> list[tuple[int, int]]:
    prune = {"method": "prune", "sparsity": 0.75, "num_steps": 0, "how": "once"}
    report = compress(run_of(folder, "counted", prune), device="cpu")
    torch.distributed.barrier()
    return [(stage.num_parameters, stage.num_pruned) for stage in report.stages]


def test_ranks_count_the_weights_of_the_whole_model(folder, world):
    total = sum(p.numel() for p in model_of(folder).parameters())
    pruned = 3 * sum(
        p.numel() for n, p in model_of(folder).named_parameters() if "blocks" in n and p.dim() > 1
    )
    for found in world(2).run(counted_on_rank, folder):
        assert found == [(total, 0), (total, pruned // 4)]
