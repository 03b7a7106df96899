"""Pruned and quantized models: what the table says of them, and their folders in use."""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops import hub
from pyops.cli import main
from pyops.compress import CompressReport, compress, load_model, run
from pyops.compress.methods import work
from pyops.hub import HubError
from pyops.mesh import ALONE
from pyops.models import GPT
from pyops.tensor_parallel import Ranks
from tests.compress.tiny_folder import LENGTH, make_folder, run_of

pytestmark = pytest.mark.cpu_only

PRUNE = {"method": "prune", "num_steps": 12, "lr": 3e-3, "batch": 4}
FINETUNE = {"method": "finetune", "num_steps": 4, "batch": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("methods") / "gpt", num_layers=2)


def again(folder: Path | str) -> GPT:
    return load_model(folder, ranks=Ranks.of(ALONE))


def matrices(model: GPT) -> dict[str, torch.Tensor]:
    """The weights that a step prunes by default."""
    return {
        name: p.detach() for name, p in model.named_parameters() if "blocks" in name and p.dim() > 1
    }


def zeros(model: GPT) -> int:
    return sum(int((w == 0).sum()) for w in matrices(model).values())


@pytest.mark.parametrize(
    ("step", "form"),
    [
        ({"sparsity": 0.75}, "packed"),
        ({"sparsity": 0.75, "how": "once", "scope": "global"}, "dense"),
        ({"pattern": "2:4", "permute": True, "how": "once"}, "2:4"),
        ({"pattern": "2:4"}, "packed"),
    ],
    ids=["gradual", "once", "2:4", "SR-STE"],
)
def test_what_is_pruned_stays_so_while_the_model_learns_on(folder, step, form):
    name = f"pruned_{form}_{'_'.join(step)}".replace(":", "")
    report = compress(run_of(folder, name, {**PRUNE, **step}, FINETUNE, model={"form": form}))
    before, pruned_stage, tuned = report.stages
    model = again(report.output)
    share = 0.5 if "pattern" in step else 0.75
    total = sum(w.numel() for w in matrices(model).values())
    assert pruned_stage.num_pruned == tuned.num_pruned == round(share * total)
    assert abs(zeros(model) - tuned.num_pruned) <= 2, "all of them, also after the last step"
    assert f"{before.num_parameters - tuned.num_pruned:,}" in report.table()
    of_each = {round(float((w == 0).float().mean()), 2) for w in matrices(model).values()}
    assert (len(of_each) > 1) == (step.get("scope") == "global")
    if "permute" in step:
        kept = pruned_stage.facts["kept_magnitude"]
        assert kept["before"] < kept["after"] < 1
    halves = load_model(report.output, ranks=Ranks.of(ALONE), dtype=torch.bfloat16)
    assert all(w.equal(matrices(model)[n].bfloat16()) for n, w in matrices(halves).items())
    dense = 4 * tuned.num_parameters
    if form == "packed":
        assert tuned.file_bytes < dense - 4 * tuned.num_pruned + total / 8 + 9000
    elif form == "2:4":
        assert tuned.file_bytes < dense - 2 * total + total / 8 + 9000
        for weight in matrices(model).values():
            assert int((weight.unflatten(-1, (-1, 4)) != 0).sum(-1).max()) == 2


def test_a_step_that_fills_what_was_pruned_is_seen(folder, monkeypatch):
    monkeypatch.setattr(work, "hold", lambda *_: nullcontext())
    once = {**PRUNE, "sparsity": 0.5, "how": "once", "num_steps": 0}
    with pytest.raises(RuntimeError, match="has pruned weights that are not 0"):
        compress(run_of(folder, "filled", once, FINETUNE))
    assert not (folder.parent / "filled").exists()


@pytest.mark.full
def test_more_is_pruned_of_what_is_pruned(folder, monkeypatch):
    """The second step begins with the masks of the first, and none of its weights comes back."""
    seen: list[dict[str, torch.Tensor]] = []
    genuine = run.apply_step

    def apply(work: work.Work, step: Any) -> None:
        genuine(work, step)
        seen.append({name: mask.alive() for name, mask in work.masks.items()})

    monkeypatch.setattr(run, "apply_step", apply)
    steps = [{**PRUNE, "sparsity": s, "num_steps": n, "how": h} for s, n, h in MORE]
    report = compress(run_of(folder, "more", *steps))
    shares = [stage.num_pruned for stage in report.stages[1:]]
    assert shares[0] < shares[1] < shares[2]
    for before, after in pairwise(seen):
        assert all(not (after[name] & ~before[name]).any() for name in before)


MORE = [(0.5, 0, "once"), (0.7, 6, "gradual"), (0.8, 3, "once")]


@pytest.fixture(scope="module")
def coded(folder: Path) -> CompressReport:
    steps = [
        {**PRUNE, "sparsity": 0.5, "num_steps": 0, "how": "once"},
        {"method": "quantize", "activations": "token"},
    ]
    return compress(run_of(folder, "coded", *steps))


def test_a_quantized_folder_has_the_logits_of_its_table(folder, coded):
    before, pruned_stage, last = coded.stages
    assert last.num_pruned == pruned_stage.num_pruned
    assert last.num_parameters == before.num_parameters
    assert last.tensor_bytes < 0.6 * before.tensor_bytes
    assert last.file_bytes < 0.6 * before.file_bytes
    assert 0 < abs(last.loss - pruned_stage.loss) < 0.05
    found = run.score(again(coded.output), texts_of(folder), batch=8)
    assert math.isclose(found.loss, last.loss, rel_tol=1e-6)


def texts_of(folder: Path) -> Any:
    config = run_of(folder, "none", FINETUNE)
    tokenizer = run.FolderModel.read(str(folder)).tokenizer
    return run.Texts.prepare(config, tokenizer, torch.device("cpu"))


def test_eval_and_generate_use_a_quantized_folder(folder, coded, capsys):
    place = folder.parent
    words = ["--data", str(place / "held_out.txt"), "--sequence-length", str(LENGTH)]
    words += ["--cache", str(place / "cache"), "--device", "cpu"]
    assert main(["eval", coded.output, *words]) == 0
    assert f"loss {coded.stages[-1].loss:.4f} nats per token" in capsys.readouterr().out
    assert main(["eval", coded.output, *words, "--precision", "bf16"]) == 0
    found = float(capsys.readouterr().out.split("loss ")[1].split()[0])
    assert abs(found - coded.stages[-1].loss) < 0.05
    ask = ["--prompt", "to be, or", "--max-new-tokens", "8", "--device", "cpu"]
    assert main(["generate", coded.output, *ask]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("to be, or")
    assert len(shown) == len("to be, or") + 8 + 1, "eight bytes, and the end of the line"
    assert main(["eval", coded.output, *words, "--pp", "2"]) == 2
    assert "which are not cut into stages; use tp" in capsys.readouterr().err


def test_what_reads_plain_weights_refuses_a_quantized_folder(coded):
    with pytest.raises(HubError, match="quantization_config"):
        hub.load(coded.output)


INT4: dict[str, Any] = {"method": "quantize", "weights": "int4", "group": 16}


@pytest.fixture(scope="module")
def to_nearest(folder: Path) -> dict[str, torch.Tensor]:
    return again(compress(run_of(folder, "int4_nearest", INT4)).output).state_dict()


@pytest.mark.parametrize("algorithm", ["smooth", "awq", "gptq", "aware"])
def test_each_algorithm_is_another_model(folder, to_nearest, algorithm):
    more = {"num_steps": 3, "batch": 4} if algorithm == "aware" else {"algorithm": algorithm}
    report = compress(run_of(folder, f"int4_{algorithm}", {**INT4, **more}))
    assert report.stages[-1].loss < report.stages[0].loss + 0.3
    other = again(report.output).state_dict()
    codes = [name for name in other if name.endswith("codes")]
    assert len(codes) == 2 * 4
    assert any(not other[name].equal(to_nearest[name]) for name in codes)


def quantized_on_rank(rank: int, group: object, folder: Path) -> float:
    report = compress(run_of(folder, "shared", {"method": "quantize"}), device="cpu")
    torch.distributed.barrier()
    return report.stages[-1].loss


def test_two_ranks_quantize_as_one_does(folder, world):
    found = world(2).run(quantized_on_rank, folder)
    alone = compress(run_of(folder, "by_one", {"method": "quantize"}), device="cpu")
    assert found[0] == found[1]
    assert math.isclose(found[0], alone.stages[-1].loss, rel_tol=1e-5)
    ours, theirs = (again(folder.parent / n).state_dict() for n in ("shared", "by_one"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_damaged_note_is_named(folder, coded, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(coded.output, copy)
    (copy / "compressed.json").write_text("{}")
    with pytest.raises(HubError, match=r"compressed\.json is damaged"):
        again(copy)


def test_a_folder_that_is_compressed_already_is_refused(folder, coded):
    with pytest.raises(ValueError, match="holds weights in the form 'quantized'"):
        config = run_of(Path(coded.output), "twice", FINETUNE)
        compress(config)
