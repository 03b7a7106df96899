"""Elastic, pack and forecast of options in one dict, as tests vary them: each goes to the dataclass
that has it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pyops import elastic
from pyops.elastic import (
    CacheOptions,
    Elastic,
    ElasticCallbacks,
    ElasticConfig,
    ElasticData,
    ElasticRun,
    Epoch,
    ForecastRun,
    Packing,
    PackingConfig,
)

__all__ = ["forecast", "make_elastic", "pack"]


def _taken(kind: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options that are fields of a dataclass; they are taken out of the dict."""
    names = {each.name for each in fields(kind)} & set(options)
    return {name: options.pop(name) for name in names}


def make_elastic(layers: Any, **options: Any) -> Elastic:
    """An Elastic; `cache` and `packing` are those of ElasticRun, packing as a dict."""
    packing = options.pop("packing", None)
    run = {"cache": options.pop("cache", None) or CacheOptions()}
    run |= {"packing": None if packing is None else PackingConfig(**packing)}
    run |= _taken(ElasticRun, options)
    return Elastic(
        layers,
        run=ElasticRun(**run),
        data=ElasticData(**_taken(ElasticData, options)),
        config=ElasticConfig(**_taken(ElasticConfig, options)),
        callbacks=ElasticCallbacks(**_taken(ElasticCallbacks, options)),
        **options,
    )


def pack(costs: Any, **options: Any) -> Packing:
    """pyops.elastic.pack."""
    config = PackingConfig(**_taken(PackingConfig, options))
    return elastic.pack(costs, config=config, **options)


def forecast(costs: Any, *, policy: Any, **options: Any) -> tuple[Epoch, ...]:
    """pyops.elastic.forecast."""
    run = ForecastRun(**_taken(ForecastRun, options))
    return elastic.forecast(costs, policy=policy, run=run, packing=PackingConfig(**options))
