"""What a rank does in the slow-link bench: all-reduces, training steps and whole short runs, by
ways to communicate.

    WAYS: name -> (model, corpus) -> (wrapped model, optimizer)        one line of the picture each

Runs within `slow_link.Link.run`; times with a barrier before each sample, and reads the interface's
own counters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.links.slow_link import wire_bytes
from pyops.config import Config, load_config
from pyops.data import Batches, prepare, validation_rows
from pyops.models import GPT

__all__ = [
    "ALONE",
    "BASELINE",
    "CONFIG",
    "FP32",
    "WAYS",
    "Pair",
    "all_reduces",
    "losses",
    "steps",
    "torch_adamw",
]

FP32, BASELINE, ALONE = "gloo fp32", "torch DDP + AdamW", "no communication"
CONFIG = Path(__file__).resolve().parents[2] / "examples" / "gpt_small.toml"
FULL_RUN = 2000  # steps
MATRIX_RANK = 4  # of PowerSGD
RATES = {
    "OneBitLAMB": 1e-2
}  # LAMB's step is a share of a layer's norm, so its learning rate is another; else the example's
Pair = tuple[nn.Module, Any]


class Sample:
    """The time and the bytes of one piece of work, on this rank."""

    def __enter__(self) -> Sample:
        dist.barrier()
        self._before, self._start = wire_bytes()["sent"], time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        dist.barrier()  # all of the others' bytes are on their way too; its own few are the bench's
        self.sent = wire_bytes()["sent"] - self._before


# --- all-reduce
# --------------------------------------------------------------------------------------------------


def _reducers(x: Tensor, names: list[str]) -> dict[str, Callable[[], object]]:
    """name -> a call that makes x the mean over ranks; each with its own memory of errors."""
    from pyops.comm.compression.compressed import compressed_all_reduce
    from pyops.comm.compression.error_feedback import ErrorFeedback
    from pyops.comm.compression.names import parse

    found: dict[str, Callable[[], object]] = {}
    for name in names:
        if name == FP32:
            found[name] = partial(dist.all_reduce, x)
            continue
        codec = parse(name)
        rank, size = dist.get_rank(), dist.get_world_size()
        error = (
            ErrorFeedback(x.numel(), codec=codec, rank=rank, size=size, device=x.device)
            if codec.feedback
            else None
        )
        found[name] = partial(compressed_all_reduce, x, codec=codec, error=error)
    return found


def _check(names: list[str]) -> None:
    """Each gives about the mean, and the same bits on every rank; the bounds are those of the
    codecs."""
    bound = {"bf16": 2**-7, "int8": 0.05, "onebit": 1.5}
    rows = torch.randn(dist.get_world_size(), 100_003, generator=torch.Generator().manual_seed(0))
    for name in names:
        if name == FP32:
            continue
        x = rows[dist.get_rank()].clone()
        _reducers(x, [name])[name]()
        every = [torch.empty_like(x) for _ in rows]
        dist.all_gather(every, x)
        if not all(torch.equal(e, x) for e in every):
            raise AssertionError(f"{name}: the ranks' results differ")
        error = float((x - rows.mean(0)).norm() / rows.mean(0).norm())
        if not 0 < error < bound[name.partition("(")[0]]:
            raise AssertionError(f"{name}: relative error {error} of a mean")


def all_reduces(*, numel: int, names: list[str], rounds: int) -> dict[str, Any]:
    """{name: {"seconds": [...], "sent": [...]}} of an all-reduce of `numel` fp32, in turn."""
    _check(names)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    calls = _reducers(x, names)
    small = _reducers(x[:65536], names)
    for call in small.values():  # connections, threads, buffers
        call()
    found: dict[str, Any] = {name: {"seconds": [], "sent": []} for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            with Sample() as sample:
                calls[name]()
            x.mul_(0.5)  # a sum of sums would overflow
            found[name]["seconds"].append(sample.seconds)
            found[name]["sent"].append(sample.sent)
    return found


# --- training
# --------------------------------------------------------------------------------------------------


def torch_adamw(model: nn.Module, config: Config) -> Any:
    """torch's fused AdamW with the configuration's options."""
    options = config.optimizer
    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim >= 2],
            "weight_decay": options.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps, fused=True
    )


def _torch_ddp(model: nn.Module, config: Config, *, warmup: int, power_sgd: bool = False) -> Pair:
    # The hook's all-reduces are issued from callbacks, in no set order over buckets, which Gloo
    # can't bear: one bucket for it.
    wrapped = nn.parallel.DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        bucket_cap_mb=1024 if power_sgd else None,
    )
    if power_sgd:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=MATRIX_RANK,
            start_powerSGD_iter=max(2, warmup),
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped, torch_adamw(wrapped, config)


def _alone(model: nn.Module, config: Config, *, warmup: int) -> Pair:
    """Each rank for itself, which no way to communicate can beat."""
    return model, torch_adamw(model, config)


def _pyops(
    model: nn.Module, config: Config, *, warmup: int, optimizer: str = "adamw", codec: str = "none"
) -> Pair:
    from pyops.train.setup.recipe import make_data_parallel, make_optimizer

    options = replace(config.optimizer, name=optimizer, compression_warmup_steps=warmup)
    config = replace(
        config, optimizer=options, communication=replace(config.communication, codec=codec)
    )
    wrapped = make_data_parallel(config, model, group=dist.group.WORLD)
    return wrapped, make_optimizer(config, wrapped, group=dist.group.WORLD)


WAYS: dict[str, Callable[..., Pair]] = {
    BASELINE: _torch_ddp,
    "AdamW, bf16": partial(_pyops, codec="bf16"),
    "AdamW, int8": partial(_pyops, codec="int8"),
    "AdamW, PowerSGD": partial(_pyops, codec="power_sgd"),
    "torch DDP + PowerSGD": partial(_torch_ddp, power_sgd=True),
    "OneBitAdam": partial(_pyops, optimizer="onebit_adam"),
    "OneBitLAMB": partial(_pyops, optimizer="onebit_lamb"),
    "ZeroOneAdam": partial(_pyops, optimizer="zero_one_adam"),
}


class Trainer:
    """The example GPT on the standard library's sources, communicating in one of the WAYS; calling
    it takes one step."""

    def __init__(
        self,
        way: str,
        *,
        batch: int,
        num_steps: int,
        warmup: int,
        make: Callable[..., Pair] | None = None,
        rate: float | None = None,
    ) -> None:
        overrides = [f"train.num_steps={num_steps}", f"train.batch={batch}"]
        rate = RATES.get(way) if rate is None else rate
        overrides += [] if rate is None else [f"optimizer.lr={rate}"]
        self.config = load_config(CONFIG, overrides=overrides)
        length, seed = self.config.model.sequence_length, self.config.train.seed
        rows = {
            "sequence_length": length,
            "rank": dist.get_rank(),
            "num_ranks": dist.get_world_size(),
        }
        self.corpus = prepare(
            self.config.data, vocab_size=self.config.model.vocab_size, sequence_length=length
        )
        self.batches = Batches(self.corpus, global_batch=batch, seed=seed, **rows)
        self.held_out = validation_rows(
            self.corpus, num_sequences=self.config.train.num_validation_sequences, **rows
        )
        self.inner = GPT(
            self.config.model, seed=seed, device=torch.device("cpu"), dtype=torch.float32
        )
        make = make or (_alone if way == ALONE else WAYS[way])
        self.model, self.optimizer = make(self.inner, self.config, warmup=warmup)
        self.clips = not hasattr(self.optimizer, "max_grad_norm")  # torch's does not
        self.tokens = (
            batch * length / (dist.get_world_size() if self.clips else 1)
        )  # DDP averages, pyops' recipe sums
        self.step = 0

    def _nats(self, rows_BT: Tensor) -> Tensor:
        logits_BTV = self.model(rows_BT[:, :-1])
        return functional.cross_entropy(
            logits_BTV.flatten(0, 1), rows_BT[:, 1:].flatten(), reduction="sum"
        )

    def __call__(self) -> float:
        """One step; this rank's nats per token before it."""
        rows_BT = self.batches.next()
        nats = self._nats(rows_BT)
        (nats / self.tokens).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optimizer.lr_at(
                self.step, num_steps=self.config.train.num_steps
            )
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.clips)
        self.step += 1
        return float(nats.detach()) / rows_BT[:, 1:].numel()

    @torch.no_grad()
    def validate(self) -> float:
        """Nats per byte on held-out text, over all ranks."""
        totals = torch.zeros(2, dtype=torch.float64)
        for rows_BT in self.held_out.split(4):
            logits_BTV = self.inner(rows_BT[:, :-1])
            totals[0] += functional.cross_entropy(
                logits_BTV.flatten(0, 1), rows_BT[:, 1:].flatten(), reduction="sum"
            )
            totals[1] += rows_BT[:, 1:].numel()
        dist.all_reduce(totals)
        return float(totals[0] / totals[1])


def steps(*, ways: dict[str, int], batch: int, warmup: int) -> dict[str, Any]:
    """{way: {"seconds": [...], "sent": [...]}} of `ways[way]` training steps each after the
    warm-up, the ways in turn."""
    trainers = {
        way: Trainer(way, batch=batch, num_steps=warmup + 2 + count, warmup=warmup)
        for way, count in ways.items()
    }
    found: dict[str, Any] = {way: {"seconds": [], "sent": []} for way in ways}
    scheduled = {
        way: trainers.pop(way) for way in ways if hasattr(trainers[way].optimizer, "schedule")
    }
    for trainer in trainers.values():
        for _ in range(warmup + 2):
            trainer()
    for turn in range(max(ways.values())):
        for way, trainer in trainers.items():
            if turn < ways[way]:
                with Sample() as sample:
                    trainer()
                found[way]["seconds"].append(sample.seconds)
                found[way]["sent"].append(sample.sent)
    return found | {
        way: _over_schedule(trainer, count=ways[way]) for way, trainer in scheduled.items()
    }


def _over_schedule(trainer: Trainer, *, count: int) -> dict[str, list[float]]:
    """Of 0/1 Adam, whose steps differ: the mean step of a run of FULL_RUN steps, by steps of each
    kind on a short schedule."""
    optimizer = trainer.optimizer
    rounds = replace(optimizer.schedule, var_freeze_step=FULL_RUN // 5).rounds(FULL_RUN)._asdict()
    optimizer.schedule = replace(optimizer.schedule, var_freeze_step=12, local_step_scaler=8)
    samples: dict[str, list[Sample]] = {kind: [] for kind in rounds}
    for step in range(1, 13 + 4 * count):
        with Sample() as sample:
            trainer()
        if step > 1:  # which makes connections and buffers
            samples[optimizer.schedule.kind(step)].append(sample)
    share = {kind: many / FULL_RUN for kind, many in rounds.items()}
    seconds = sum(
        share[kind] * statistics.median(s.seconds for s in each) for kind, each in samples.items()
    )
    sent = sum(
        share[kind] * statistics.fmean(s.sent for s in each) for kind, each in samples.items()
    )
    return {"seconds": [seconds] * count, "sent": [sent] * count}


def losses(
    *,
    way: str,
    batch: int,
    num_steps: int,
    warmup: int,
    make: Callable[..., Pair] | None = None,
    rate: float | None = None,
) -> dict[str, Any]:
    """A run of `num_steps`: {"seconds": since the start, after each step, "loss": of each, "sent",
    "validation_loss"}. `rate` is the learning rate, in place of the way's or the example's."""
    trainer = Trainer(way, batch=batch, num_steps=num_steps, warmup=warmup, make=make, rate=rate)
    own, seconds = [], []
    with Sample() as sample:
        start = time.perf_counter()
        for _ in range(num_steps):
            own.append(trainer())
            seconds.append(time.perf_counter() - start)
    mean = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return {
        "seconds": seconds,
        "loss": mean.tolist(),
        "sent": sample.sent,
        "validation_loss": trainer.validate(),
    }
