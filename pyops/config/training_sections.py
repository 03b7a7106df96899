"""The sections of a configuration that say how to train: optimizer, communication, replicas,
precision, sharing, recomputing, steps."""

from __future__ import annotations

from dataclasses import dataclass

from pyops.comm.compression.names import parse
from pyops.config.config_error import require
from pyops.healing import QuorumConfig
from pyops.local_sgd import LocalSGDConfig
from pyops.local_sgd.config import METHODS
from pyops.optim.lr_scheduler import cosine_ratio
from pyops.parameter_server import DownpourConfig
from pyops.parameter_server.config import check_number
from pyops.precision import PRECISIONS

__all__ = [
    "COMMUNICATING",
    "OPTIMIZERS",
    "AsynchronousConfig",
    "CommunicationConfig",
    "HealingConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "TrainConfig",
]

DOWNPOUR = "downpour"
COMMUNICATING = ("onebit_adam", "onebit_lamb", "zero_one_adam")
OPTIMIZERS = (
    "adamw",
    "adam",
    "sgd",
    "lion",
    "lamb",
    "lars",
    "adafactor",
    "adagrad",
    *COMMUNICATING,
)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, and the learning rate's way: a straight warmup, then half a cosine down to
    `final_lr_ratio` of the peak.

    Attributes:
        name: Of `OPTIMIZERS`. beta1 and beta2 are those of Adam, Lion and LAMB and their one-bit
            kin, eps of these (but Lion) and of Adagrad, momentum of SGD and LARS.
        max_grad_norm: Gradients with a larger norm are scaled down to it; 0: never. weight_decay
            goes to weights of two or more dimensions only.
        layer_decay: Of runs over numbered samples, each layer's rate is that part of the rate of
            the layer behind it; the head's is the whole one (Clark et al., 2020, ELECTRA; 1: all
            alike).
        compression_warmup_steps: How long a one-bit optimizer communicates in full before it
            compresses; "auto": until the variance is stable. A fifth of the run is a good choice.
    """

    name: str = "adamw"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.1
    layer_decay: float = 1.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 100
    final_lr_ratio: float = 0.1
    compression_warmup_steps: int | str = "auto"

    def __post_init__(self) -> None:
        require(self, f"one of {', '.join(OPTIMIZERS)}", ("name",), lambda v: v in OPTIMIZERS)
        require(self, "more than 0", ("lr", "eps"), lambda v: v > 0)
        require(
            self, "0 or more, and less than 1", ("beta1", "beta2", "momentum"), lambda v: 0 <= v < 1
        )
        require(
            self, "0 or more", ("weight_decay", "max_grad_norm", "warmup_steps"), lambda v: v >= 0
        )
        require(self, "between 0 and 1", ("final_lr_ratio",), lambda v: 0 <= v <= 1)
        require(self, "more than 0, up to 1", ("layer_decay",), lambda v: 0 < v <= 1)
        require(
            self,
            '1 or more, or "auto"',
            ("compression_warmup_steps",),
            lambda v: v == "auto" if isinstance(v, str) else v >= 1,
        )

    @property
    def communicates(self) -> bool:
        """Whether the optimizer itself communicates, once its warm-up is over."""
        return self.name in COMMUNICATING

    def lr_at(self, step: float, *, num_steps: int) -> float:
        """The learning rate of step 0, 1, ..., num_steps - 1, or of what lies between two."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        ratio = cosine_ratio(
            step - self.warmup_steps,
            steps=num_steps - self.warmup_steps,
            final=self.final_lr_ratio,
        )
        return self.lr * ratio


@dataclass(frozen=True)
class CommunicationConfig:
    """How gradients, or the momenta of one-bit optimizers, go over the wire.

    Attributes:
        codec: "none" for full precision (one-bit optimizers then take "onebit"), or a name that
            `pyops.comm.compression.names.parse` knows: bf16, int8, fp8, onebit, ...
    """

    codec: str = "none"

    def __post_init__(self) -> None:
        try:
            parse(self.codec)
        except ValueError as error:
            raise ValueError(f"codec is {self.codec!r}; {str(error).partition('; ')[2]}") from None


@dataclass(frozen=True)
class AsynchronousConfig(LocalSGDConfig):
    """How ranks train as replicas of their own: the options of `pyops.local_sgd.LocalSGDConfig`,
    and some of `pyops.parameter_server.DownpourConfig` and `ShardConfig`.

    Attributes:
        method: "none": all ranks take each step together. "local_sgd", "diloco", "easgd": each rank
            is a replica, and the replicas meet. "downpour": each rank is a replica and holds a
            shard of the parameters, to which gradients are pushed (Dean et al., 2012).
        every: With "downpour", which meets for nothing else, steps from one report of the mean loss
            over all replicas to the next; signals are heard there, too.
        codec: The name of a codec, or "none"; with "downpour" of the pushes.
        fetch_every: Of "downpour", like all that follow: steps from one fetch of the parameters to
            the next; n_fetch in the paper.
        push_every: Steps from one push of the accrued gradients to the next; n_push in the paper.
        fetch_delay: Steps during which a fetch travels; 0: the replica waits for its push and then
            for its fetch.
        local_lr: The rate of the replica's own steps between two fetches; 0: it makes none.
        warm_start: Steps of the first replica alone, before the others begin; at most `every`.
    """

    method: str = "none"
    codec: str = "none"
    fetch_every: int = 1
    push_every: int = 1
    fetch_delay: int = 1
    local_lr: float = 0.0
    warm_start: int = 0

    def __post_init__(self) -> None:
        if self.method == DOWNPOUR:
            check_number(self.every, name="every", least=1)
            check_number(self.warm_start, name="warm_start", least=0)
            if self.warm_start > self.every:
                raise ValueError(
                    f"warm_start is {self.warm_start}, but the replicas meet after {self.every} "
                    "steps (every); give warm_start <= every"
                )
            self.check_codec()
            _ = self.downpour
        elif self.on and self.method not in METHODS:
            known = ", ".join((*METHODS, DOWNPOUR))
            raise ValueError(f"method is {self.method!r}; choose one of none, {known}")
        elif self.on:
            super().__post_init__()

    @property
    def downpour(self) -> DownpourConfig:
        """How a replica of "downpour" exchanges with the shards."""
        return DownpourConfig(
            fetch_every=self.fetch_every,
            push_every=self.push_every,
            fetch_delay=self.fetch_delay,
            local_lr=self.local_lr,
            push_codec=self.wire_codec,
        )

    @property
    def on(self) -> bool:
        """Whether ranks are replicas that train on their own."""
        return self.method != "none"


@dataclass(frozen=True)
class HealingConfig:
    """How a run goes on where a rank dies, without a restart of the others: see
    `pyops.healing.QuorumConfig`. `pyops launch` starts the ranks and the replacements.

    Attributes:
        copy_every: Steps from one copy of the state, in the memory of each rank and of its
            neighbor, to the next; so many at most are taken again. 0: ranks are not replaced.
        lease: Seconds without a sign of life after which a rank is dead.
        timeout: Seconds of a collective after which a rank that stands still is taken for lost.
        meeting_timeout: Seconds that the others wait for a replacement: longer than it takes to
            start, and than timeout and lease together.
    """

    copy_every: int = 0
    lease: float = 5.0
    timeout: float = 60.0
    meeting_timeout: float = 300.0

    def __post_init__(self) -> None:
        require(self, "0 or more", ("copy_every",), lambda v: v >= 0)
        _ = self.quorum(1)

    @property
    def on(self) -> bool:
        """Whether ranks that die are replaced."""
        return self.copy_every > 0

    def quorum(self, ranks: int) -> QuorumConfig:
        """How so many ranks meet, always all of them.

        Args:
            ranks: Of the run.
        """
        return QuorumConfig(
            min_replicas=ranks,
            start_replicas=ranks,
            lease=self.lease,
            timeout=self.timeout,
            meeting_timeout=self.meeting_timeout,
        )


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtype of parameters, activations and gradients; the optimizer has fp32 master weights
    where it is of 16 bits.

    Attributes:
        dtype: fp32, bf16, or fp16, whose gradients would vanish without a loss scale: it begins at
            initial_scale, doubles after scale_window good steps in a row, and halves when
            `hysteresis` steps overflowed, never below minimum_scale.
    """

    dtype: str = "fp32"
    initial_scale: float = 65536.0
    scale_window: int = 1000
    hysteresis: int = 2
    minimum_scale: float = 1.0

    def __post_init__(self) -> None:
        require(self, f"one of {', '.join(PRECISIONS)}", ("dtype",), lambda v: v in PRECISIONS)
        require(self, "more than 0", ("minimum_scale",), lambda v: v > 0)
        require(
            self,
            f"at least minimum_scale, {self.minimum_scale:g}",
            ("initial_scale",),
            lambda v: v >= self.minimum_scale,
        )
        require(self, "1 or more", ("scale_window", "hysteresis"), lambda v: v >= 1)


@dataclass(frozen=True)
class RecomputeConfig:
    """Activations that are not kept for backward, but computed again (Chen et al.,
    arXiv:1604.06174).

    Attributes:
        modules: Which ones, by patterns of their names, such as ["blocks.*"]; their inputs are
            kept.
        offload: Where: "none" (on the device) or "cpu".
    """

    modules: tuple[str, ...] = ()
    offload: str = "none"

    def __post_init__(self) -> None:
        require(self, "none or cpu", ("offload",), lambda v: v in ("none", "cpu"))


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at a time, on what, and what is kept.

    Attributes:
        batch: Sequences in a step, over all ranks.
        micro_batch: Sequences that a rank puts through the model at once; 0: all of its share.
        device: "auto" is cuda where there is one.
        deterministic: On CUDA, only kernels that give the same bits each time.
        algorithm: Of the all-reduce (pyops.comm.all_reduce).
        validate_every, checkpoint_every: Steps; 0: only at the end. A run over samples validates at
            the end of each epoch instead, and saves there, too.
        num_checkpoints: Checkpoints that stay.
        memory_checkpoint_every: Steps from one checkpoint in host memory, the rank's own and a
            neighbor's, to the next; 0: none (Wang et al., Gemini, SOSP 2023). Of a run over text
            whose ranks take each step together.
        memory_checkpoint_folder: Where the memory is.
        plot: Whether a run that ends draws its curves as a picture.
        tensorboard: Whether it writes TensorBoard files.
    """

    num_steps: int = 1000
    batch: int = 32
    micro_batch: int = 0
    seed: int = 0
    device: str = "auto"
    compile: bool = False
    deterministic: bool = True
    algorithm: str = "auto"
    bucket_bytes: int = 25 << 20
    log_every: int = 10
    validate_every: int = 100
    num_validation_sequences: int = 128
    checkpoint_every: int = 200
    num_checkpoints: int = 2
    memory_checkpoint_every: int = 0
    memory_checkpoint_folder: str = "/dev/shm"
    num_sample_tokens: int = 300
    plot: bool = True
    tensorboard: bool = True
    folder: str = "runs"

    def __post_init__(self) -> None:
        require(
            self,
            "1 or more",
            (
                "num_steps",
                "batch",
                "log_every",
                "num_checkpoints",
                "num_validation_sequences",
                "bucket_bytes",
            ),
            lambda v: v >= 1,
        )
        require(
            self,
            "0 or more",
            (
                "micro_batch",
                "validate_every",
                "checkpoint_every",
                "memory_checkpoint_every",
                "num_sample_tokens",
                "seed",
            ),
            lambda v: v >= 0,
        )
        require(self, "auto, cpu or cuda", ("device",), lambda v: v in ("auto", "cpu", "cuda"))
        require(
            self,
            "auto, native, ring, two_shot, shared_memory or symmetric",
            ("algorithm",),
            lambda v: v in ("auto", "native", "ring", "two_shot", "shared_memory", "symmetric"),
        )
