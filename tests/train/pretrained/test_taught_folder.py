"""A Hugging Face folder learns from another one: the losses of plain torch, on every layout."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.config import AdapterConfig, Config, ConfigError, DistillConfig, ModelFolder
from pyops.config import ParallelConfig as Parallel
from pyops.distill import Distillation, freeze, student_from_layers
from pyops.mesh import Axes, Mesh
from pyops.train import train
from pyops.train.pretrained.folder_data import FolderData
from pyops.train.pretrained.folder_model import FolderModel
from pyops.train.pretrained.folder_training import FolderTraining
from pyops.zero import ZeroConfig
from tests.grids import full
from tests.parallel.tiny_folder import CHAT, make_folder, make_tokenizer
from tests.parallel.tiny_transformers import transformers
from tests.train.pretrained.test_folder_training import curve, make_config
from tests.train.tiny_run import losses, train_on_rank

pytestmark = pytest.mark.cpu_only
STEPS = 20
OPTIONS = {"soft": 0.4, "hard": 0.6, "temperature": 2.0}


def taught(folder: Path, name: str, *, keep: tuple[int, ...] = (), **options: Any) -> Config:
    """A tiny run beside a teacher of other values and more layers."""
    teacher = folder / "teacher"
    if not teacher.exists():
        torch.manual_seed(7)
        make_folder(teacher, chat=CHAT, num_hidden_layers=5, initializer_range=0.1)
    sections = {key: options.pop(key) for key in ("parallel", "zero", "train") if key in options}
    train_options = {
        "num_steps": STEPS,
        "validate_every": 0,
        "num_sample_tokens": 0,
        **sections.pop("train", {}),
    }
    distill = DistillConfig(teacher=str(teacher), keep=keep, **{**OPTIONS, **options})
    return make_config(folder, name, distill=distill, train=train_options, **sections)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The run of one process."""
    config = taught(tmp_path_factory.mktemp("alone"), "alone")
    train(config)
    return config


def test_the_losses_are_those_of_plain_torch(tmp_path: Path):
    """Of Distillation over models of transformers, and torch's AdamW."""
    config = taught(tmp_path, "plain", keep=(0, 2), hidden=1.5, layers=((0, 1), (-1, -1)))
    still = tmp_path / "still"
    make_folder(still, chat=CHAT)  # without dropout
    config = dataclasses.replace(config, model_folder=ModelFolder(str(still), 32))
    train(config)
    load = transformers.LlamaForCausalLM.from_pretrained
    model = student_from_layers(load(still), [0, 2])
    teacher = freeze(load(tmp_path / "teacher"))
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    rows = FolderData(config, FolderModel.read(str(still)), Mesh(Axes())).batches
    loss_of, found = Distillation(config.distill.options), []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr_at(step, num_steps=STEPS)
        batch = rows.next()
        targets = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        loss = loss_of(model, teacher, {"input_ids": batch["input_ids"]}, targets).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append(float(loss.detach()))
    assert found[0] - found[-1] > 0.5, "nothing is learnt"
    torch.testing.assert_close(torch.tensor(losses(config)), torch.tensor(found), rtol=0, atol=1e-5)
    made = load(config.folder / "model")
    assert made.config.num_hidden_layers == 2
    assert (config.folder / "model" / "tokenizer.json").exists()
    for ours, theirs in zip(made.parameters(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2, zero 3": {"zero": ZeroConfig(stage=3), "train": {"micro_batch": 1}},
    "pp 2": {"parallel": Parallel(pp=2, num_microbatches=2)},
    "tp 2": {"parallel": Parallel(tp=2)},
    "dp 2": {},
    "dp 2, zero 1": {"zero": ZeroConfig(stage=1)},
    "dp 2, zero 2": {"zero": ZeroConfig(stage=2)},
    "pp 2, recomputed": {"parallel": Parallel(pp=2, recompute="always")},
    "pp 2, zbv": {"parallel": Parallel(pp=2, schedule="zbv")},
    "tp 2, zero 3": {"parallel": Parallel(tp=2), "zero": ZeroConfig(stage=3)},
}
SUITE = 1  # a student over a pipeline is as any folder: test_folder_training.py


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:SUITE], *map(full, list(LAYOUTS)[SUITE:])])
def test_two_ranks_have_the_losses_of_one(alone: Config, layout: str, world: Any):
    config = taught(Path(alone.train.folder).parent, layout.replace(" ", "-"), **LAYOUTS[layout])
    world(2).run(train_on_rank, config)
    torch.testing.assert_close(curve(config), curve(alone), rtol=0, atol=1e-5)


def kept_elements(rank: int, group: Any, config: Config) -> int:
    """Elements of the teacher's parameters that this rank has memory for."""
    teacher = FolderTraining(config, device=torch.device("cpu")).trainer.parts.loss.in_head.teacher
    parameters = [] if teacher is None else teacher.parameters()
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    return sum(held.values()) // 4


def test_where_the_teacher_is(alone: Config, world: Any):
    """Shared out at stage 3; on the last stage of a pipeline alone."""
    folder = Path(alone.train.folder).parent
    whole = FolderModel.read(alone.distill.teacher).num_parameters
    spread = taught(folder, "spread", zero=ZeroConfig(stage=3))
    for held in world(2).run(kept_elements, spread):
        assert held < 0.1 * whole  # outside of a forward; the shares are no parameters
    staged = taught(folder, "staged", parallel=Parallel(pp=2))
    assert world(2).run(kept_elements, staged) == [0, whole]


def test_a_run_resumes_and_validates_by_its_labels(alone: Config):
    folder = Path(alone.train.folder).parent
    early = taught(folder, "early", train={"checkpoint_every": 10, "num_checkpoints": 9})
    train(early)
    (early.folder / "checkpoints" / f"step-{STEPS:08d}").rename(folder / "gone")
    rows = losses(early)
    train(early, resume=True)
    assert torch.equal(torch.tensor(losses(early)), torch.tensor(rows))
    assert torch.equal(curve(early), curve(alone))
    plain = dataclasses.replace(early, name="early", distill=DistillConfig())
    longer = dataclasses.replace(plain.train, num_steps=STEPS + 1)
    changed = dataclasses.replace(early.distill, keep=(0, 1))
    with pytest.raises(ConfigError, match=r"distill\.keep is \(0, 1\), but checkpoint"):
        train(dataclasses.replace(early, train=longer, distill=changed), resume=True)
    outcome = train(dataclasses.replace(early, name="early"), resume=True)
    model = transformers.LlamaForCausalLM.from_pretrained(early.folder / "model").eval()
    data = FolderData(early, FolderModel.read(early.model_folder.folder), Mesh(Axes()))
    (batch,) = data.validation()
    with torch.no_grad():
        assert abs(float(model(**batch).loss) - outcome.validation_loss) < 1e-4


def test_what_does_not_fit_is_refused(alone: Config, world: Any, tmp_path: Path):
    wide = make_folder(tmp_path / "wide", chat=CHAT, hidden_size=64)
    few = make_folder(tmp_path / "few", chat=CHAT, vocab_size=70)
    other = make_folder(tmp_path / "other", chat=CHAT)
    make_tokenizer(other, more=3)
    squashed = tmp_path / "squashed"
    transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    ).save_pretrained(squashed)
    make_tokenizer(squashed)
    (squashed / "chat_template.jinja").write_text(CHAT)
    cases = [
        ({"teacher": str(few)}, "a model of 70 words, but the one of .* has 64"),
        ({"teacher": str(other)}, "have other tokens"),
        ({"teacher": str(wide), "hidden": 1.0}, "are 32 wide and those of .* 64"),
        ({"teacher": str(squashed)}, "Gemma2ForCausalLM does something to its logits"),
        ({"model": squashed}, "squashed has final_logit_softcapping 30.0 in config.json"),
        ({"keep": (0, 9)}, r"distill\.keep: keep has layer 9; the teacher's are 0 to 3"),
        ({"teacher": str(tmp_path / "none")}, "none/config.json does not exist"),
    ]
    for changes, said in cases:
        model = ModelFolder(str(changes.pop("model", alone.model_folder.folder)), 32)
        distill = dataclasses.replace(alone.distill, **changes)
        chosen = dataclasses.replace(alone, name="refused", model_folder=model, distill=distill)
        first, second = world(2).run(train_on_rank, chosen)
        assert first == second
        assert re.search(said, str(first)), first


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"parallel": Parallel(cp=2)}, r"parallel\.cp is 2.*distill\.teacher.*set it to 1"),
        (
            {"parallel": Parallel(tp=2, sequence_parallel=True)},
            r"parallel\.sequence_parallel is true.*set it to false",
        ),
        ({"parallel": Parallel(pp=2)}, r"distill\.hidden is 1\.0.*parallel\.pp"),
        ({"adapter": AdapterConfig(rank=2)}, r"distill\.keep is \[0\].*adapter"),
    ],
)
def test_sections_that_do_not_go_together(alone: Config, sections: dict[str, Any], said: str):
    keep = (0,) if "adapter" in sections else ()
    distill = dataclasses.replace(alone.distill, hidden=1.0, keep=keep)
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(alone, distill=distill, **sections)
