"""Tasks: what there is to learn, as samples with numbers, whatever the layout that learns it.

task = make_task(config)                                      of [task], [data], and its model's
                                                              section
inputs, target, named = task.batch(samples, epoch=epoch)      rows of these numbers; PADDING: a row
                                                              that counts nothing
pipeline.step(inputs, target, shape=...,                      with loss=task.loss, reduction="sum"
              scale=1 / (rows * task.terms), **named)
task.loss(output, target)                                     nats, summed: times 1 / (rows * terms)
                                                              it is the mean
task.score(pipeline(inputs, **named), target)                 right ones, or nats

pretraining    characters     masked_text
                   |               |          all but the head's weights: FirstValues
task             digits         passages      text
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pyops.config import Config, ConfigError
from pyops.context_parallel import ContextRanks
from pyops.data import (
    Corpus,
    DataConfig,
    Images,
    load_characters,
    load_digits,
    prepare,
    prepare_passages,
)
from pyops.data.images import copies, enlarged
from pyops.data.passages import FAMILIES, mask_rows
from pyops.distill import ClassTeacher
from pyops.elastic import PADDING
from pyops.mesh import ALONE
from pyops.models import (
    BERT,
    GPT,
    BERTClassifier,
    BERTConfig,
    CoAtNet,
    CoAtNetConfig,
    GPTConfig,
    ViT,
    ViTConfig,
)
from pyops.models.vocabulary_head import IGNORED
from pyops.precision import PRECISIONS
from pyops.tensor_parallel import RanksLike
from pyops.tensor_parallel.grids import Grid

__all__ = ["Batch", "Task", "make_task"]

Batch = tuple[Tensor, Tensor, dict[str, Any]]
IMAGES = {"digits": load_digits, "characters": load_characters}


class Task(ABC):
    """samples: to train on, numbered from 0. held_out: likewise, to score. block_count: blocks of
    the model between first layer and head. first_layer: its name in the model. tokens: T, which a
    row has between them. told_shape: layers are given shape=(rows, tokens). terms: what a row's
    loss is divided by: gradients' scale is 1 / (rows * terms). metric: what a row's score is,
    "accuracy" (the more the better), or "nats" for each of held_out_terms. digest: of the data and
    its split, where they are read from files; "" where the numbers of samples tell them apart.
    """

    name: str
    samples: int
    held_out: int
    block_count: int
    tokens: int
    terms: int = 1
    held_out_terms: int = 1
    first_layer: str = "embedding"
    told_shape: bool = True
    metric: str = "accuracy"
    digest: str = ""
    places: Tensor | None = None
    """int64 [n]: the places of the tokens of a row that this rank has, so that losses and scores
    are summands of the ranks; None: it has all."""
    teacher: ClassTeacher | None = None
    """Of a task that scores accuracy: what the samples to train on are learnt from, beside their
    labels; None: nothing."""
    _config: Any

    @abstractmethod
    def model(
        self,
        *,
        seed: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        context: ContextRanks | None = None,
    ) -> nn.Module:
        """A model with `layers()`: embedding, blocks, head.

        Args:
            seed: As of GPT.
            device: Of the parameters.
            dtype: Of the parameters.
            context: The ranks that share out the tokens of rows, as of GPT.
        """

    def model_like(self, config: Any, **options: Any) -> nn.Module:
        """As `model`, of other sizes.

        Args:
            config: Of the model.
            options: As of `model`.
        """
        other = copy.copy(self)
        other._config = config
        return other.model(**options)

    @property
    def layer_names(self) -> list[str]:
        """The names that the model's `layers()` have in it."""
        return [self.first_layer, *(f"blocks.{i}" for i in range(self.block_count)), "head"]

    def batch(self, samples: Tensor, *, epoch: int = 0, held_out: bool = False) -> Batch:
        """(inputs of the first layer [n, ...], target [n] or [n, T], named arguments of layers) of
        samples int64 [n].

        Named tensors [n, ...] are to be cut like the batch, the rest goes whole; `shape` is for the
        caller to add. Rows of sample PADDING have some input, and no target that counts.

        Args:
            held_out: Numbers are of the held-out samples.

        Raises:
            ValueError: For a number that no sample has.
        """
        bound = self.held_out if held_out else self.samples
        padding = samples == PADDING
        numbers = samples[~padding]
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < bound:
            what = "held-out samples" if held_out else "samples"
            raise ValueError(
                f"samples are numbered {int(numbers.min())} to {int(numbers.max())}; "
                f"{self.name} has {bound} {what}: give "
                f"numbers from 0 to {bound - 1}, or pyops.elastic.PADDING for rows that don't count"
            )
        rows = samples.masked_fill(padding, 0)
        inputs, target = self._rows(rows, epoch, held_out)
        target = self.padding(target, samples)
        if self.teacher is not None and not held_out:
            target = self.teacher.targets(rows, inputs, target)
        return inputs, target, self._named(target, held_out)

    @abstractmethod
    def _rows(self, rows: Tensor, epoch: int, held_out: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples."""

    def _named(self, target: Tensor, held_out: bool) -> dict[str, Any]:
        return {}

    @staticmethod
    def padding(target: Tensor, samples: Tensor) -> Tensor:
        """target with nothing that counts in rows of sample PADDING."""
        return torch.where(
            (samples == PADDING).view(-1, *[1] * (target.dim() - 1)), IGNORED, target
        )

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """-ln p(target), summed over what counts; with a teacher its loss.

        Args:
            output: Of the last layer. Scalar, fp32 (fp64 of an fp64 model).
        """
        output = output if output.dtype == torch.float64 else output.float()
        if self.teacher is not None:
            return self.teacher.total(output, target)
        found = functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")
        return found if self._has_first else found * 0.0

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """By `metric`: how many of the rows that count are right; or their nats.

        Args:
            output: Of held-out rows. fp64 scalar.
        """
        right = (output.argmax(dim=-1) == target).sum().double()  # no label is IGNORED
        return right if self._has_first else right * 0.0

    @property
    def _has_first(self) -> bool:
        """Whether the first token of a row is this rank's, on which what all ranks compute of it
        counts."""
        return self.places is None or bool((self.places == 0).any())

    def augmentation(self, epoch: int) -> int:
        """A number that tells apart the inputs that a sample has in different epochs; 0 where they
        are always the same."""
        return 0


class _Nats(Task):
    """A task whose head gives the loss itself: summed, or of held-out rows one number for each
    target."""

    metric = "nats"

    def _named(self, target: Tensor, held_out: bool) -> dict[str, Any]:
        return {"targets_BT": target, "reduction": "none" if held_out else "sum"}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return output.sum()

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        return output.double().sum()


class ImagesTask(Task):
    """What is on the image: count copies of each are trained on, and the held-out ones are scored
    as they are."""

    def __init__(
        self,
        name: str,
        config: ViTConfig | CoAtNetConfig,
        parts: tuple[Images, Images],
        *,
        count: int,
        dtype: torch.dtype,
    ) -> None:
        self.name, self._config, self._dtype = name, config, dtype
        train, kept = parts
        self._labels = (train.labels, kept.labels)
        self._images = (copies(train.images, count), kept.images[:, None])
        self.samples, self.held_out = (each.shape[:2].numel() for each in self._images)
        self.block_count, self.tokens = config.num_layers, config.num_tokens
        self._side = config.image_size
        if isinstance(config, CoAtNetConfig):
            self.first_layer, self.told_shape = "stem", False

    def model(
        self,
        *,
        seed: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        context: ContextRanks | None = None,
        group: RanksLike | Grid = ALONE,
    ) -> nn.Module:
        """See `Task.model`.

        Args:
            seed, device, dtype, context: As there.
            group: The ranks that share the layers of a ViT, or a grid of them.
        """
        if isinstance(self._config, ViTConfig):
            where: dict[str, Any] = {"device": device, "dtype": dtype}
            return ViT(self._config, group=group, context=context, seed=seed, **where)
        return CoAtNet(self._config, seed=seed, device=device, dtype=dtype)

    def _rows(self, rows: Tensor, epoch: int, held_out: bool) -> tuple[Tensor, Tensor]:
        images = self._images[held_out]
        image, copy = rows // images.shape[1], rows % images.shape[1]
        found = enlarged(images[image, copy], self._side)
        return found.to(self._dtype), self._labels[held_out][image]


class PassagesTask(Task):
    """Which family of modules of the standard library the passage is from: copies of each are
    trained on, as of images."""

    name = "passages"

    def __init__(
        self,
        config: BERTConfig,
        data: DataConfig,
        *,
        each: int,
        count: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._config = config
        passages = prepare_passages(
            data, vocab_size=config.vocab_size, length=config.sequence_length, group=group
        )
        self.digest = passages.digest
        self._parts = (passages.train.fewer(each).copied(count), passages.held_out)
        self._labels = tuple(part.labels for part in self._parts)
        self.samples, self.held_out = (len(part) for part in self._parts)
        self.block_count, self.tokens = config.num_layers, config.sequence_length

    def model(
        self,
        *,
        seed: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        context: ContextRanks | None = None,
    ) -> nn.Module:
        return BERTClassifier(
            self._config,
            num_labels=len(FAMILIES),
            context=context,
            seed=seed,
            device=device,
            dtype=dtype,
        )

    def _rows(self, rows: Tensor, epoch: int, held_out: bool) -> tuple[Tensor, Tensor]:
        return self._parts[held_out].cut(rows), self._labels[held_out][rows]


class MaskedTask(_Nats):
    """Masked tokens of the standard library; at the first place, instead of BERT's next sentence,
    which file the row is from.

    As in BERT the loss is the mean of each of the two, added: a row's file counts as much as all
    its masked tokens. Of what is held out, masked tokens alone are scored, always the same ones.
    """

    name = "masked_text"

    def __init__(
        self,
        config: BERTConfig,
        data: DataConfig,
        *,
        count: int,
        seed: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._config, self._seed = config, seed
        self._passages = prepare_passages(
            data, vocab_size=config.vocab_size, length=config.sequence_length, group=group
        )
        self.digest = self._passages.digest
        self._parts = (self._passages.text.copied(count), self._passages.held_out)
        self._files = self._parts[False].files
        self.samples, self.held_out = (len(part) for part in self._parts)
        self.block_count, self.tokens = config.num_layers, config.sequence_length
        row, first = torch.zeros(1, self.tokens, device="cpu"), torch.zeros(1, device="cpu")
        self.terms = self.held_out_terms = int(
            mask_rows(row, passages=self._passages, samples=first, seed=0, epoch=0)[1].sum()
        )

    def model(
        self,
        *,
        seed: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        context: ContextRanks | None = None,
    ) -> nn.Module:
        return BERT(self._config, context=context, seed=seed, device=device, dtype=dtype)

    def _rows(self, rows: Tensor, epoch: int, held_out: bool) -> tuple[Tensor, Tensor]:
        tokens = self._parts[held_out].cut(rows)
        seed, epoch = (0, -1) if held_out else (self._seed, epoch)
        given, masked = mask_rows(
            tokens, passages=self._passages, samples=rows, seed=seed, epoch=epoch
        )
        target = torch.where(masked, tokens, IGNORED)
        if not held_out:
            target[:, 0] = self._files[rows]
        return given, target

    def _named(self, target: Tensor, held_out: bool) -> dict[str, Any]:
        return {
            "targets_BT": target,
            "reduction": "none",
        }  # a sum could not tell the file from the tokens

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self._has_first:  # of a row, and of this rank's tokens, side by side
            return output[:, 0].sum() * self.terms + output[:, 1:].sum()
        return output.sum()

    def augmentation(self, epoch: int) -> int:
        return epoch + 1


class TextTask(_Nats):
    """The next token, in every sequence of T of a corpus: sample i is tokens [i T, i T + T]."""

    name = "text"

    def __init__(
        self, config: GPTConfig, corpus: Corpus, *, most_held_out: int, order: str = "zigzag"
    ) -> None:
        self._config, self._order, length = config, order, config.sequence_length
        self._texts, self.digest = (corpus.train, corpus.validation), corpus.digest
        self.samples, available = ((len(text) - 1) // length for text in self._texts)
        self.held_out = min(most_held_out, available)
        self._places = torch.tensor(
            [i * available // self.held_out for i in range(self.held_out)], device="cpu"
        )
        self.block_count, self.tokens = config.num_layers, length
        self.terms = self.held_out_terms = length

    def model(
        self,
        *,
        seed: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        context: ContextRanks | None = None,
    ) -> nn.Module:
        return GPT(
            self._config,
            context=context,
            order=self._order,
            seed=seed,
            device=device,
            dtype=dtype,
        )

    def _rows(self, rows: Tensor, epoch: int, held_out: bool) -> tuple[Tensor, Tensor]:
        text, length = self._texts[held_out], self.tokens
        places = (self._places[rows] if held_out else rows).tolist()
        found = [
            torch.from_numpy(text[n * length : (n + 1) * length + 1].astype("int64"))
            for n in places
        ]
        whole_BT = (
            torch.stack(found)
            if found
            else torch.zeros(0, length + 1, dtype=torch.int64, device="cpu")
        )
        return whole_BT[:, :-1], whole_BT[:, 1:]


def make_task(config: Config, *, group: dist.ProcessGroup | None = None) -> Task:
    """The task of `config.task`. Rank 0 of the group (None: the default one) builds what is cached,
    so all ranks call it.

    Raises:
        ConfigError: For a model that can't be cut into layers, CorpusError for data that is not
            there.
    """
    options, data = config.task, config.data
    if options.kind in IMAGES:
        load, dtype = IMAGES[options.kind], PRECISIONS[config.precision.dtype].dtype
        parts = load(held_out=data.validation_fraction)
        model = getattr(config, options.section)
        return ImagesTask(options.kind, model, parts, count=options.num_copies, dtype=dtype)
    if options.kind == "passages":
        return PassagesTask(
            config.bert, data, each=options.num_passages, count=options.num_copies, group=group
        )
    if options.kind == "masked_text":
        return MaskedTask(
            config.bert, data, count=options.num_copies, seed=config.train.seed, group=group
        )
    if config.model.tied_head:
        raise ConfigError(
            "model.tied_head is true: the head's table would be frozen with the "
            "embedding; set model.tied_head to false"
        )
    length = config.model.sequence_length
    corpus = prepare(data, vocab_size=config.model.vocab_size, sequence_length=length, group=group)
    return TextTask(
        config.model,
        corpus,
        most_held_out=config.train.num_validation_sequences,
        order=config.parallel.cp_order,
    )
