"""python -m benchmarks.elastic.elastic_forecast: PipeTransformer's machines, simulated, beside what
its authors measured.

Two servers of eight Quadro RTX 5000; ViT-B/16 at 224 x 224, and BERT-large at 384 tokens. The
tables of docs/elastic.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyops.elastic import Bound, Epoch, ForecastRun, Machine, PackingConfig, forecast, pack
from pyops.pipeline import Costs, LayerCosts, Profile, schedule, simulate

__all__ = ["bert", "machine", "run", "seconds", "throughput", "vit"]

# The device's speed and what a micro-batch costs besides are fitted to the published throughput of
# ViT with K = 8 at M = K and 2 K, 368 and 410 samples a second on two pipelines of about 400
# samples each.
FLOPS = 5.6e12
OVERHEAD = 11e-3
PCIE, INFINIBAND = 15.754e9, 5e9
SPEEDUPS = {"1/5": 2.04, "1/4": 2.44, "1/3": 2.83, "2/5": 3.29, "1/2": 3.86}  # CIFAR-100, by alpha
THROUGHPUT = (368, 410, 386, 340, 298, 286)  # M = 1 K ... 6 K
VIT = {"batch": 400, "blocks": 12, "cached_from": 3}
BERT = {"batch": 64, "blocks": 24, "cached_from": 5}


def transformer(dim: int, tokens: int, blocks: int, *, embedding: int, head: int) -> Profile:
    """Costs of a sample: each block's attention and MLP a layer, in fp32; backward takes twice as
    long as forward."""
    sizes = [(embedding, 0.0)]
    for _ in range(blocks):
        attention = 8.0 * dim * dim * tokens + 4.0 * tokens * tokens * dim
        sizes += [
            (4 * (dim * dim + dim) + 2 * dim, attention),
            (8 * dim * dim + 7 * dim, 16.0 * dim * dim * tokens),
        ]
    sizes += [(2 * dim, 0.0), (head, 2.0 * head)]
    layers = []
    for i, (parameters, flops) in enumerate(sizes):
        seconds = flops / FLOPS
        layers.append(
            LayerCosts(
                forward=seconds,
                backward=2 * seconds,
                forward_apart=seconds,
                input_gradient=seconds,
                weight_gradient=seconds,
                activation=4 * tokens * dim,
                parameters=parameters,
                weights=((i, 4 * parameters),),
            )
        )
    return Profile(tuple(layers))


def vit() -> Profile:
    return transformer(768, 197, 12, embedding=742_656, head=769_000)


def bert() -> Profile:
    return transformer(1024, 384, 24, embedding=(30_522 + 512 + 2 + 2) * 1024, head=2 * 1025)


def machine() -> Machine:
    return Machine(devices=16, overhead=OVERHEAD, bandwidth=PCIE, reduce_bandwidth=INFINIBAND)


def run(
    profile: Profile,
    model: dict[str, int],
    alpha: float | None,
    *,
    epochs: int = 10,
    cache: bool = True,
    compress: bool = True,
    replicate: bool = True,
) -> tuple[Epoch, ...]:
    """As published: each replica's batch kept, frozen layers in 1/6 of their memory."""
    return forecast(
        profile,
        policy=None if alpha is None else Bound(alpha),
        run=ForecastRun(
            epochs=epochs,
            samples=50_000,
            batch=model["batch"],
            stages=8,
            blocks=model["blocks"],
            layers_of=lambda n: 1 + 2 * n,
            cached_from=model["cached_from"] if cache else None,
            compress=compress,
        ),
        packing=PackingConfig(
            machine=machine(),
            batch_policy="replica",
            schedule="gpipe",
            head=2,
            replicate=replicate,
        ),
    )


def seconds(epochs: Sequence[Epoch]) -> float:
    return sum(epoch.seconds for epoch in epochs)


def throughput(profile: Profile, micro_batches: int) -> float:
    """Samples a second of two pipelines of 8 stages, 400 samples each, nothing frozen."""
    bounds = pack(profile, frozen=0, stages=8, batch=8).boundaries
    costs, scale = profile.costs(bounds), VIT["batch"] / micro_batches
    parts: dict[str, Any] = {
        part: [scale * costs.of(part, s) for s in range(8)]
        for part in ("forward", "input_gradient", "weight_gradient")
    }
    for part in ("forward", "input_gradient"):
        parts[part] = [OVERHEAD + each for each in parts[part]]
    step = simulate(
        schedule("gpipe", num_stages=8, num_microbatches=micro_batches), Costs(**parts)
    ).makespan
    return 2 * VIT["batch"] / step


def main() -> None:
    profile, large = vit(), bert()
    base, base_large = seconds(run(profile, VIT, None)), seconds(run(large, BERT, None))
    print(
        "| alpha | ViT-B/16, simulated | published, CIFAR-100 | BERT-large, simulated "
        "|\n|---|---:|---:|---:|"
    )
    for name, published in SPEEDUPS.items():
        above, below = map(int, name.split("/"))
        one, other = run(profile, VIT, above / below), run(large, BERT, above / below)
        print(
            f"| {name} | {base / seconds(one):.2f} | {published} | "
            f"{base_large / seconds(other):.2f} |"
        )
    print("\n| ViT-B/16, alpha = 1/3 | simulated | published, ImageNet |\n|---|---:|---:|")
    rows = [
        ("freeze only", {"compress": False, "cache": False}, 0.95),
        ("fewer stages and cache", {"replicate": False}, 1.26),
        ("fewer stages and more replicas", {"cache": False}, 2.27),
        ("all", {}, 2.83),
    ]
    for title, options, published in rows:
        print(
            f"| {title} | {base / seconds(run(profile, VIT, 1 / 3, **options)):.2f} | {published} |"
        )
    print(
        "\n| epoch | frozen | stages | replicas | micro-batches | samples/s "
        "|\n|---|---:|---:|---:|---:|---:|"
    )
    for i, epoch in enumerate(run(profile, VIT, 1 / 3)):
        packing = epoch.packing
        rate = 50_000 / epoch.seconds
        print(
            f"| {i} | {epoch.frozen} | {packing.stages} | {packing.replicas} | "
            f"{packing.micro_batches} | {rate:.0f} |"
        )
    print("\n| micro-batches, of 8 stages | simulated samples/s | published |\n|---:|---:|---:|")
    for times, published in enumerate(THROUGHPUT, start=1):
        print(f"| {8 * times} | {throughput(profile, 8 * times):.0f} | {published} |")


if __name__ == "__main__":
    main()
