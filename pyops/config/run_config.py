"""Config: all of a run, and what of its sections does not go together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pyops.comm.compression.names import parse
from pyops.config.config_error import ConfigError
from pyops.config.rules.asynchronous import check_asynchronous
from pyops.config.rules.folder import check_folder
from pyops.config.rules.grids import check_grid
from pyops.config.rules.healing import check_healing
from pyops.config.rules.memory_checkpoints import check_memory_checkpoints
from pyops.config.rules.samples import check_elastic, check_taught
from pyops.config.run_sections import RunSections
from pyops.config.task_config import check_task
from pyops.context_parallel import Order

__all__ = ["Config"]


@dataclass(frozen=True)
class Config(RunSections):
    """All of a run.

    Attributes:
        name: Of the run, which becomes the name of its folder.
        model: The GPT of a run over text: [model].
        model_folder: The Hugging Face folder that is trained in place of it: [model] with the key
            folder.
        adapter: What is trained of a folder's model in place of its parameters: [adapter].
        distill: Whom the run learns from beside its labels: [distill].
        data: The text: [data].
        optimizer: [optimizer].
        communication: [communication].
        precision: [precision].
        zero: [zero].
        recompute: [recompute].
        parallel: [parallel].
        elastic: [elastic].
        asynchronous: [asynchronous].
        healing: How ranks that die are replaced: [healing].
        train: [train].
        observe: What the run notes of itself: [observe].
        task: What is learnt: [task].
        vit: The model of a task over images: [vit].
        coatnet: Another model of a task over images: [coatnet].
        bert: The model of a task over passages: [bert].

    Raises:
        ValueError: Sections that do not go together, or a value that is out of its range.
    """

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(
                f"name is {self.name!r}; it becomes a folder: give it letters, digits, - and _"
            )
        check_asynchronous(self)
        check_grid(self)
        check_memory_checkpoints(self)
        check_healing(self)
        if self.data.packing != "none" and (self.model_folder.given or self.over_samples):
            raise ValueError(
                f"data.packing is {self.data.packing!r}, which a run over text takes that trains a "
                'GPT without [elastic]; set data.packing to "none"'
            )
        kinds = ("text", "tokens") if self.model_folder.given else ("text", "tokens", "python")
        if self.data.kind not in (("text",) if self.over_samples else kinds):
            raise ValueError(
                f"data.kind is {self.data.kind!r}; a run over text takes it that trains a GPT "
                'without [elastic], and "tokens" one that trains a folder; set it to "text"'
            )
        if self.model_folder.given:
            self.zero.validate("zero.")
            check_folder(self)
            return
        if self.adapter.rank:
            raise ValueError(
                f"adapter.rank is {self.adapter.rank}, but a run without model.folder trains all "
                "parameters of its model; set it to 0, or name a folder"
            )
        if self.data.reads_bytes and self.model.vocab_size < 256:
            raise ValueError(
                f"model.vocab_size is {self.model.vocab_size}; data.tokenizer 'bytes' "
                "has 256 tokens: set 256"
            )
        self.zero.validate("zero.")
        self.elastic.validate("elastic.")
        if self.zero.offload != "none" and not self.zero.stage:
            raise ValueError(
                f"zero.offload is {self.zero.offload!r}, but zero.stage is 0, which keeps states "
                "on the device: set zero.stage to 1"
            )
        check_task(self.task, data=self.data, vit=self.vit, coatnet=self.coatnet, bert=self.bert)
        if self.distill.on:
            check_taught(self)
        if self.elastic.on:
            check_elastic(self)
        self._check_sharing()
        if self.optimizer.layer_decay < 1 and not self.over_samples:
            raise ValueError(
                f"optimizer.layer_decay is {self.optimizer.layer_decay}, which a run "
                "over text in which nothing is frozen has "
                "not; set it to 1, or another task.kind"
            )
        if self.optimizer.communicates and hasattr(parse(self.communication.codec), "all_reduce"):
            raise ValueError(
                f"communication.codec is {self.communication.codec!r}, which needs "
                "matrices; the momenta of optimizer.name = "
                f"{self.optimizer.name!r} travel as one flat tensor: set "
                "communication.codec to onebit or int8"
            )

    def _check_sharing(self) -> None:
        """What doesn't go with [zero] or [parallel]."""
        tp, pp, optimizer = self.parallel.tp, self.parallel.pp, self.optimizer.name
        sizes = {f"parallel.{axis}": getattr(self.parallel, axis) for axis in ("tp", "pp", "cp")}
        axis, ranks = next(((key, n) for key, n in sizes.items() if n > 1), ("parallel.pp", pp))
        key, value, off = (
            ("zero.stage", self.zero.stage, 0) if self.zero.stage else (axis, ranks, 1)
        )
        if pp > 1:
            self._check_pipeline()
        if not self.zero.stage and max(sizes.values()) == 1:
            return
        self._check_rows()
        if self.optimizer.communicates:
            raise ValueError(
                f"{key} is {value}, but optimizer.name {optimizer!r} communicates "
                f"itself: set {key} to {off}, or "
                "optimizer.name to adamw, say"
            )
        if self.communication.codec != "none":
            raise ValueError(
                f"{key} is {value}, which does not take communication.codec "
                f"{self.communication.codec!r}: set "
                f'communication.codec to "none", or {key} to {off}'
            )
        if tp > 1 and optimizer in ("lamb", "lars", "adafactor"):
            raise ValueError(
                f"parallel.tp is {tp}, but optimizer.name {optimizer!r} goes by sums "
                "over each layer, of which a rank has a "
                "part: set adamw, say, or parallel.tp to 1"
            )

    def _check_rows(self) -> None:
        """Whether the ranks of parallel.cp can share out the rows of the model."""
        parallel, cp, section = self.parallel, self.parallel.cp, self.task.section
        if cp == 1 or self.model_folder.given:
            return  # a folder's rows are padded
        if section == "coatnet":
            raise ValueError(
                f"parallel.cp is {cp}, whose ranks share out tokens, but task.model is "
                '"coatnet", whose convolutions mix neighbors; set it to 1, or task.model to "vit"'
            )
        order = parallel.cp_order if section == "model" else "contiguous"
        if parallel.cp_order not in ("zigzag", order):
            raise ValueError(
                f"parallel.cp_order is {parallel.cp_order!r}, but ranks hold tokens of [{section}] "
                "side by side; leave it out"
            )
        model = getattr(self, section)
        length = getattr(model, "sequence_length", 0)  # images are padded
        wanted = Order.padded_length(order, length=length, ranks=cp) if length else 0
        if wanted != length:
            raise ValueError(
                f"parallel.cp is {cp}, whose ranks can't share out the {length} tokens of "
                f"{section}.sequence_length in the order {order}: set it to {wanted}, say"
            )
        heads = model.num_heads // parallel.tp
        if parallel.cp_method == "ulysses" and heads < cp:
            raise ValueError(
                f"parallel.cp is {cp}, but its ranks exchange the {heads} heads that each has: set "
                f'it to {heads} or less, or parallel.cp_method to "gather" or "ring"'
            )

    def _check_pipeline(self) -> None:
        pp, stages, layers = self.parallel.pp, self.parallel.num_stages, self.num_blocks + 2
        if stages > layers:
            raise ValueError(
                f"parallel.pp is {pp}, {stages} stages by schedule "
                f"{self.parallel.schedule!r}, but the model has {layers} "
                f"layers (embedding, {self.num_blocks} blocks, head); set "
                f"{self.task.section}.num_layers to {stages - 2} "
                "or more, or fewer stages"
            )

    @property
    def num_blocks(self) -> int:
        """Of the model that the task is for."""
        found: int = getattr(self, self.task.section).num_layers
        return found

    @property
    def over_samples(self) -> bool:
        """Whether the run goes over numbered samples, epoch by epoch: every task does but text, and
        text with [elastic]."""
        return self.task.kind != "text" or self.elastic.on

    @property
    def folder(self) -> Path:
        """Where the run's outputs go."""
        return Path(self.train.folder) / self.name

    def check_ranks(self, num_ranks: int) -> None:
        """ConfigError unless `num_ranks` ranks can share the model and a batch, and micro-batches a
        rank's share of it. With parallel.adapt that is seen to when a layout is chosen for them."""
        if self.parallel.adapt:
            return
        batch, micro = self.train.batch, self.train.micro_batch
        try:
            num_ranks = self.parallel.copies(
                num_ranks
            )  # those that share a model see the same sequences
        except ValueError as error:
            raise ConfigError(f"parallel.{error}") from None
        if self.over_samples:  # shares may be uneven
            return
        if batch % num_ranks:
            near = max(num_ranks, round(batch / num_ranks) * num_ranks)
            raise ConfigError(
                f"train.batch is {batch} sequences, which {num_ranks} ranks can't share; "
                "set it to a multiple of "
                f"{num_ranks}, such as {near}, or parallel.adapt to true, and some ranks wait"
            )
        share = batch // num_ranks
        if micro and share % micro:
            raise ConfigError(
                f"train.micro_batch is {micro}, which does not divide a rank's {share} "
                "sequences (train.batch "
                f"{batch} / {num_ranks} ranks); set it to a divisor of {share}, or to 0 "
                "for all at once"
            )
        try:
            self.parallel.cut(share, micro_batch=micro)
        except ValueError as error:
            raise ConfigError(f"parallel.{error}") from None
