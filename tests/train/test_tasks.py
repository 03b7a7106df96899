"""Tasks: rows by their numbers, padding that counts nothing, parts that share nothing, and
scores."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pyops.config import ConfigError, PrecisionConfig
from pyops.data import load_characters, load_digits, prepare
from pyops.data.characters import CHARACTERS, FONTS
from pyops.data.images import Images, split
from pyops.data.passages import prepare_passages
from pyops.elastic import PADDING
from pyops.mesh import ALONE
from pyops.models.vocabulary_head import IGNORED
from pyops.pipeline import Pipeline, PipelineConfig, schedule
from pyops.train.initial_weights import FirstValues
from pyops.train.tasks import Task, make_task
from tests.grids import full
from tests.train.tiny_tasks import config_of

pytestmark = pytest.mark.cpu_only

KINDS = ("text", "digits", "characters", "passages", "masked_text")
ROWS = torch.tensor([3, 0, 7, 5])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The passages are cut once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=KINDS)
def task(request: pytest.FixtureRequest, cache: Path) -> Task:
    return make_task(config_of(cache, request.param))


def output_of(task: Task, model: nn.Module, inputs: Tensor, named: dict) -> Tensor:
    return one_stage(task, model)(inputs, shape=(len(inputs), task.tokens), **named)


def one_stage(task: Task, model: nn.Module, micro_batches: int = 1) -> Pipeline:
    plan = schedule("gpipe", num_stages=1, num_microbatches=micro_batches)
    return Pipeline(
        model.layers(),
        schedule=plan,
        group=ALONE,
        loss=task.loss,
        config=PipelineConfig(reduction="sum", tied=None),
    )


def test_what_a_task_says_of_itself_is_so(task):
    model = task.model(seed=0)
    named = dict(model.named_modules())
    assert [named[name] for name in task.layer_names] == model.layers()
    assert len(model.layers()) == task.block_count + 2
    inputs, target, _ = task.batch(ROWS)
    assert len(inputs) == len(target) == 4
    for held_out, terms in (
        (False, task.terms + (task.name == "masked_text")),
        (True, task.held_out_terms),
    ):
        target = task.batch(ROWS, held_out=held_out)[1]
        assert (
            (target != IGNORED).flatten(1).sum(dim=1).tolist() == [terms] * 4
            if terms > 1
            else target.shape == (4,)
        )
    assert model.layers()[0](inputs).shape[1] == task.tokens


def test_rows_go_by_their_numbers_alone(task, cache):
    inputs, target, _ = task.batch(ROWS, epoch=2)
    again = make_task(config_of(cache, task.name))
    for i, sample in enumerate(ROWS):
        alone = again.batch(sample[None], epoch=2)
        assert torch.equal(alone[0][0], inputs[i])
        assert torch.equal(alone[1][0], target[i])
    assert not torch.equal(inputs[0], inputs[1])
    last = task.batch(torch.tensor([task.samples - 1]))
    assert len(last[0]) == 1
    assert not torch.equal(task.batch(ROWS, held_out=True)[0], inputs)


def test_augmentation_says_whether_epochs_differ(task):
    first, second = (task.batch(ROWS, epoch=epoch)[0] for epoch in (0, 1))
    assert (task.augmentation(0) == task.augmentation(1)) == torch.equal(first, second)


def test_rows_of_padding_count_nothing(task):
    model = task.model(seed=1)
    some = torch.tensor([3, 0, 7, 5, PADDING, PADDING])
    for held_out in (False, True):
        padded, alone = (task.batch(each, held_out=held_out) for each in (some, some[:4]))
        outputs = [output_of(task, model, inputs, named) for inputs, _, named in (padded, alone)]
        found = [
            task.loss(output, each[1])
            for output, each in zip(outputs, (padded, alone), strict=True)
        ]
        assert len(padded[0]) == 6
        torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)
        scores = [
            task.score(output, each[1])
            for output, each in zip(outputs, (padded, alone), strict=True)
        ]
        torch.testing.assert_close(scores[0], scores[1], rtol=1e-6, atol=0)
    nothing = task.batch(torch.tensor([PADDING, PADDING]))
    assert float(task.loss(output_of(task, model, nothing[0], nothing[2]), nothing[1])) == 0.0


def test_a_step_in_micro_batches_is_that_of_the_rows(task):
    inputs, target, named = task.batch(ROWS)
    found = []
    for several in (1, 4):
        model = task.model(seed=1)
        pipeline = one_stage(task, model, several)
        loss = pipeline.step(
            inputs, target, scale=1 / (4 * task.terms), shape=(4 // several, task.tokens), **named
        )
        found.append((loss, *(p.grad for p in model.parameters())))
        assert float(loss) / (4 * task.terms) > 1.0  # nats of one, at the beginning
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert all(float(g.abs().sum()) > 0 for g in found[0][1:] if g is not None)


def test_the_score_of_held_out_rows_whatever_the_micro_batches(task):
    model = task.model(seed=1).eval()
    inputs, target, named = task.batch(torch.tensor([3, 0, 7, PADDING]), held_out=True)
    scores = []
    for several in (1, 2):
        output = one_stage(task, model, several)(inputs, shape=(4 // several, task.tokens), **named)
        scores.append(task.score(output, target))
        if task.metric == "nats":
            torch.testing.assert_close(scores[-1].float(), task.loss(output, target))
    torch.testing.assert_close(scores[0], scores[1])


def test_accuracy_counts_right_rows(cache):
    task = make_task(config_of(cache, "digits"))
    output = torch.eye(10)[[1, 2, 3, 4]]
    assert float(task.score(output, torch.tensor([1, 2, 9, IGNORED]))) == 2.0


def test_numbers_that_no_sample_has_are_refused(task):
    for number, held_out, bound in (
        (task.samples, False, task.samples),
        (task.held_out, True, task.held_out),
        (-2, False, ""),
    ):
        with pytest.raises(ValueError, match=f"numbered .*; {task.name} has {bound}"):
            task.batch(torch.tensor([0, number]), held_out=held_out)


def test_held_out_rows_are_those_of_the_held_out_part(cache):
    digits = make_task(config_of(cache, "digits"))
    kept = load_digits(held_out=0.4)[1]
    inputs, target, _ = digits.batch(torch.arange(digits.held_out), held_out=True)
    assert torch.equal(inputs, kept.images)
    assert torch.equal(target, kept.labels)
    config = config_of(cache, "text")
    corpus = prepare(config.data, sequence_length=16)
    rows = make_task(config).batch(torch.arange(8), held_out=True)[0]
    assert bytes(rows[0].tolist()) == corpus.validation[:16].tobytes()
    assert all(bytes(row.tolist()) in corpus.validation.tobytes() for row in rows)
    assert len({tuple(row) for row in rows.tolist()}) > 3  # the text repeats itself


def test_a_passage_is_judged_from_its_first_token(cache):
    model = make_task(config_of(cache, "passages")).model(seed=3)
    x = torch.randn(2, 32, 16, requires_grad=True)
    model.head(x).sum().backward()
    assert float(x.grad[:, 0].abs().sum()) > 0
    assert float(x.grad[:, 1:].abs().sum()) == 0


def test_digits_are_split_once_and_in_full():
    train, held_out = load_digits(held_out=0.5)
    assert (len(train.labels), len(held_out.labels)) == (898, 899)
    assert (float(train.images.min()), float(train.images.max())) == (-1.0, 1.0)
    assert train.images.shape[1:] == (1, 8, 8)
    sklearn = pytest.importorskip("sklearn.datasets").load_digits()
    both = torch.cat([train.images, held_out.images]).flatten(1)
    labels = torch.cat([train.labels, held_out.labels])
    found = [(*row, y) for row, y in zip(((both + 1) * 8).tolist(), labels.tolist(), strict=True)]
    rows = zip(sklearn.data.tolist(), sklearn.target.tolist(), strict=True)
    assert sorted(found) == sorted((*row, y) for row, y in rows)
    assert all(int(count) > 60 for count in held_out.labels.bincount())


def test_digits_of_a_release_that_keeps_the_file_elsewhere_are_the_same(monkeypatch):
    pytest.importorskip("sklearn")
    as_they_lie = load_digits()
    monkeypatch.setattr("pyops.data.digits.FILE", "nowhere")
    for found, other in zip(load_digits(), as_they_lie, strict=True):
        assert torch.equal(found.images, other.images)
        assert torch.equal(found.labels, other.labels)
        assert found.labels.dtype == torch.int64


def test_a_split_has_each_once_and_is_always_the_same():
    every = Images(torch.randn(10, 1, 2, 2), torch.arange(10))
    for part, sizes in ((0.3, [7, 3]), (0.001, [9, 1]), (0.999, [1, 9])):
        parts, again = split(every, part, name="some"), split(every, part, name="some")
        assert [len(each.labels) for each in parts] == sizes
        labels = torch.cat([each.labels for each in parts])
        assert sorted(labels.tolist()) == list(range(10))
        assert torch.equal(torch.cat([each.images for each in parts]), every.images[labels])
        assert all(torch.equal(a.labels, b.labels) for a, b in zip(parts, again, strict=True))
    assert (
        split(every, 0.3, name="others")[1].labels.tolist()
        != split(every, 0.3, name="some")[1].labels.tolist()
    )
    for part in (0.0, 1.0):
        with pytest.raises(
            ValueError, match=f"held_out is {part}; give the part .* between 0 and 1"
        ):
            split(every, part, name="some")


def test_characters_fill_their_images_and_look_like_what_they_are():
    train, held_out = load_characters(held_out=0.1)
    assert (len(train.labels), len(held_out.labels)) == (1116, 124)
    images, labels = (torch.cat(each) for each in zip(train, held_out, strict=True))
    assert labels.bincount().tolist() == [len(FONTS)] * len(CHARACTERS)
    assert (float(images.min()), float(images.max())) == (-1.0, 1.0)
    ink = images[:, 0] > -1.0
    edges = [ink[:, [0, -1]].any(dim=2).all(dim=1), ink[:, :, [0, -1]].any(dim=1).all(dim=1)]
    assert bool((edges[0] | edges[1]).all())  # from edge to edge, down or across
    means = torch.stack([images[labels == i].mean(dim=0) for i in range(len(CHARACTERS))])
    nearest = torch.cdist(images.flatten(1), means.flatten(1)).argmin(dim=1)
    assert (
        float((nearest == labels).float().mean()) > 0.6
    )  # c and C, say, are alike when both fill their image
    seven = images[labels == CHARACTERS.index("7")].mean(dim=0)[0]
    assert float(seven[0].mean()) > 0.0 > float(seven[4:, 5:].mean())


def test_copies_differ_a_little_and_stay_the_same(cache):
    task, plain = (
        make_task(config_of(cache, "digits", **options)) for options in ({"num_copies": 5}, {})
    )
    assert task.samples == 5 * plain.samples
    inputs, target, _ = task.batch(torch.arange(500))
    images, labels, _ = plain.batch(torch.arange(100))
    assert torch.equal(target, labels.repeat_interleave(5))
    assert torch.equal(inputs[::5], images)
    assert float(inputs.min()) >= -1.0
    assert float(inputs.max()) <= 1.0
    off = (inputs.view(100, 5, -1) - images.view(100, 1, -1)).abs().mean(dim=-1)
    others = (images.view(100, 1, -1) - images.view(1, 100, -1)).abs().mean(dim=-1)
    nearest = (inputs.view(500, 1, -1) - images.view(1, 100, -1)).square().sum(dim=-1).argmin(dim=1)
    assert bool((off[:, 1:] > 0.01).all())
    assert float(off[:, 1:].mean()) < 0.6 * float(others.sum()) / (100 * 99)
    assert float((nearest == torch.arange(100).repeat_interleave(5)).float().mean()) > 0.6
    assert task.held_out == plain.held_out


def test_copies_of_passages_follow_each_passage_and_have_its_label(cache):
    task, plain = (
        make_task(config_of(cache, "passages", **options))
        for options in ({"num_copies": 3, "num_passages": 40}, {})
    )
    config = config_of(cache, "passages")
    every = prepare_passages(
        config.data, vocab_size=config.bert.vocab_size, length=config.bert.sequence_length
    ).train.fewer(40)
    assert task.samples == 3 * len(every)
    samples = torch.arange(task.samples)
    tokens, labels, _ = task.batch(samples)
    assert torch.equal(tokens, every.copied(3).tokens)
    assert torch.equal(labels, every.labels.repeat_interleave(3))
    assert task.held_out == plain.held_out
    for some in (torch.arange(0, task.held_out, 7), torch.tensor([0])):
        assert all(
            torch.equal(a, b)
            for a, b in zip(*(t.batch(some, held_out=True)[:2] for t in (task, plain)), strict=True)
        )


def test_which_file_a_row_is_from_stands_in_the_first_place(cache):
    task = make_task(config_of(cache, "masked_text"))
    config = config_of(cache, "masked_text")
    passages = prepare_passages(
        config.data, vocab_size=config.bert.vocab_size, length=config.bert.sequence_length
    )
    rows = torch.arange(0, task.samples, 97)
    assert torch.equal(task.batch(rows)[1][:, 0], passages.text.files[rows])
    assert len(passages.text.files[rows].unique()) > 1
    copied = make_task(config_of(cache, "masked_text", num_copies=4))
    assert copied.samples == 4 * task.samples
    inputs, target, _ = copied.batch(rows * 4 + 1)
    assert torch.equal(target[:, 0], passages.text.files[rows])
    tokens = torch.where(target[:, 1:] == IGNORED, inputs[:, 1:], target[:, 1:])
    assert torch.equal(tokens, passages.text.copied(4).cut(rows * 4 + 1)[:, 1:])
    assert task.batch(torch.tensor([PADDING]))[1][0, 0] == IGNORED
    assert bool((task.batch(torch.arange(9), held_out=True)[1][:, 0] == IGNORED).all())


def test_which_file_a_row_is_from_counts_as_much_as_its_masked_tokens(cache):
    task = make_task(config_of(cache, "masked_text"))
    inputs, target, named = task.batch(ROWS)
    nats = output_of(task, task.model(seed=1), inputs, named)
    assert int((target[:, 1:] != IGNORED).sum()) == len(ROWS) * task.terms
    mean = nats[:, 0].mean() + nats[:, 1:].sum() / (len(ROWS) * task.terms)
    torch.testing.assert_close(task.loss(nats, target) / (len(ROWS) * task.terms), mean)


@pytest.mark.parametrize(
    ("before", "then"), [full("characters", "digits"), ("masked_text", "passages")]
)
def test_fine_tuning_begins_with_all_but_the_head(cache, before, then):
    trained, task = (
        make_task(config_of(cache, before)).model(seed=5),
        make_task(config_of(cache, then)),
    )
    drawn, model = task.model(seed=6), task.model(seed=None)
    head = {name: p for name, p in drawn.named_parameters() if name.startswith("head.")}
    weights = dict(trained.named_parameters())

    def first_values(weights: dict[str, Tensor] | None) -> FirstValues:
        return FirstValues(
            model, draw=lambda module: model.initialize(6, only=module), weights=weights
        )

    for given in (None, weights):
        for name, layer in zip(task.layer_names, model.layers(), strict=True):
            first_values(given)(name, layer)
        for name, p in model.named_parameters():
            assert torch.equal(
                p, drawn.get_parameter(name) if name in head or given is None else weights[name]
            )
    assert len(head) < len(weights)
    with pytest.raises(
        ConfigError, match=r"have no blocks.2.*weight; give a run of the same model"
    ):
        first_values({name: p for name, p in weights.items() if not name.startswith("blocks.2")})
    with pytest.raises(
        ConfigError,
        match=r"have embedding.place, which this model lacks; give a run of the same model",
    ):
        first_values({**weights, "embedding.place": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"is \(3, 3\) in the weights of task.pretrained, but"):
        first_values({**weights, "blocks.0.attention.output.weight": torch.zeros(3, 3)})


def test_images_have_the_dtype_of_the_model(cache):
    config = dataclasses.replace(config_of(cache, "digits"), precision=PrecisionConfig("bf16"))
    task = make_task(config)
    inputs, target, named = task.batch(ROWS)
    output = output_of(task, task.model(seed=0, dtype=torch.bfloat16), inputs, named)
    assert output.dtype == torch.bfloat16
    assert task.loss(output, target).dtype == torch.float32
