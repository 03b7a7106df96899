"""ExpertShape: a decoder with experts as numbers. They are counted, not planned for: pyops has no
layer of experts.

    block    attention + router E h + experts E x 3 h f, of which a token uses k + shared 3 h g
    first    d blocks with an MLP in place of the experts

E experts of width f, k for each token; g width of the experts that all tokens use. Attention has
queries, keys and values of its own, or those of a latent vector (DeepSeek-AI, arXiv:2405.04434,
section 2.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyops.hub.config_fields import ConfigFields
from pyops.plan.shapes.decoder import EXPERT_KINDS, ModelShape, gated_decoder
from pyops.plan.shapes.numbers import PlanError, check_whole, config_values, count

__all__ = ["ExpertShape", "Experts", "LatentAttention", "decoder_of_folder"]


@dataclass(frozen=True)
class Experts:
    """The experts of a block.

    Raises:
        PlanError: For a number that makes no sense.
    """

    number: int
    """Of experts."""
    per_token: int
    """How many of them each token uses."""
    hidden: int
    """Width inside one of them."""
    shared: int = 0
    """Width of those that all tokens use, together."""
    first: int = 0
    """Blocks at the beginning that have an MLP in their place."""
    bias: bool = False
    """Whether router and experts have biases."""

    def __post_init__(self) -> None:
        for name in ("number", "per_token", "hidden"):
            check_whole(name, getattr(self, name), 1)
        for name in ("shared", "first"):
            check_whole(name, getattr(self, name), 0)
        if self.per_token > self.number:
            raise PlanError(
                f"per_token is {self.per_token}, but there are {self.number} experts; give that "
                "many or fewer"
            )


@dataclass(frozen=True)
class LatentAttention:
    """Widths of an attention whose keys and values come of one short vector of a token.

    Raises:
        PlanError: For a width that makes no sense.
    """

    query_rank: int
    """Of the vector that queries come of; 0: they come of the token."""
    kv_rank: int
    """Of the vector that keys and values come of."""
    rotated: int
    """Of a head's query and key, the part that is rotated; all heads have one such key."""
    plain: int
    """The part that is not."""
    values: int
    """Of a head's value."""

    def __post_init__(self) -> None:
        check_whole("query_rank", self.query_rank, 0)
        for name in ("kv_rank", "rotated", "plain", "values"):
            check_whole(name, getattr(self, name), 1)

    def matrices(self, dim: int, heads: int) -> int:
        """Elements of the matrices.

        Args:
            dim: Width of the model.
            heads: Of the queries.
        """
        queries = heads * (self.rotated + self.plain)
        of_queries = dim * queries
        if self.query_rank:
            of_queries = (dim + queries) * self.query_rank
        keys = dim * (self.kv_rank + self.rotated)
        return (
            of_queries
            + keys
            + heads * (self.kv_rank * (self.plain + self.values) + self.values * dim)
        )


@dataclass(frozen=True)
class ExpertShape:
    """The sizes of a decoder with experts."""

    decoder: ModelShape
    """The same with an MLP in all blocks, as its first ones have it."""
    experts: Experts
    """Of the other blocks."""
    latent: LatentAttention | None = None
    """Its attention, where that is another than the decoder's."""
    query_norms: bool = False
    """Whether the queries and keys of a head have norms."""
    sinks: bool = False
    """Whether each head has a number beside its scores."""
    output_bias: bool = False
    """Whether the product behind attention has a bias."""
    predicted: int = 0
    """Further tokens that training predicts, each by a block and the head (DeepSeek-AI,
    arXiv:2412.19437, section 2.2); of `operations` alone, as they are left out of the model."""

    @property
    def name(self) -> str:
        """What the tables call it."""
        return self.decoder.name

    @property
    def attention_matrices(self) -> int:
        """Elements of the matrices of a block's attention."""
        decoder = self.decoder
        if self.latent is not None:
            return self.latent.matrices(decoder.dim, decoder.num_heads)
        return 2 * decoder.dim * (decoder.query_width + decoder.kv_width)

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        width, bias = self.experts.hidden, self.experts.bias
        return self.decoder.dim * (3 * width + bias) + 2 * bias * width

    @property
    def attention_parameters(self) -> int:
        """Of a block's attention and its two norms."""
        decoder, latent = self.decoder, self.latent
        found = self.attention_matrices + 2 * decoder.dim
        if latent is not None:
            found += latent.query_rank + latent.kv_rank
        if decoder.qkv_bias:
            found += decoder.query_width + 2 * decoder.kv_width
        found += 2 * decoder.head_width * self.query_norms
        return found + decoder.num_heads * self.sinks + decoder.dim * self.output_bias

    @property
    def blocks(self) -> int:
        """That have experts."""
        return self.decoder.num_layers - self.experts.first

    @property
    def common_parameters(self) -> int:
        """Of all that is no expert which a token chooses."""
        decoder, experts = self.decoder, self.experts
        every = decoder.num_layers * self.attention_parameters
        every += 3 * decoder.dim * (experts.first * decoder.inner + self.blocks * experts.shared)
        every += self.blocks * experts.number * (decoder.dim + experts.bias)
        heads = decoder.embedding_parameters + decoder.dim
        return every + heads + (0 if decoder.tied_head else decoder.head_parameters)

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return self.common_parameters + self.blocks * self.experts.number * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """That a token uses."""
        return (
            self.common_parameters + self.blocks * self.experts.per_token * self.expert_parameters
        )

    @property
    def score_width(self) -> int:
        """Multiply-adds of a token for each token that it sees, over 2 and of a block."""
        heads, latent = self.decoder.num_heads, self.latent
        if latent is None:
            return self.decoder.query_width
        return heads * (latent.rotated + latent.plain + latent.values) // 2

    def operations(self, *, causal: bool = False) -> float:
        """Model operations of a token, forward and backward: 6 of each element of the matrices that
        a token uses, and of scores 12 for each of the width, block and token of a row. Router,
        norms and biases do not count, as they do not in Megatron-Bridge.

        Args:
            causal: Count the scores that a causal mask leaves only: half of them.
        """
        decoder, experts = self.decoder, self.experts
        used = experts.per_token * experts.hidden + experts.shared
        of_block = self.attention_matrices + 3 * decoder.dim * used
        first = self.attention_matrices + 3 * decoder.dim * decoder.inner
        matrices = experts.first * first + self.blocks * of_block + decoder.head_parameters
        # A further token: its embedding and the last block's result become as wide as one.
        matrices += self.predicted * (of_block + 2 * decoder.dim**2 + decoder.head_parameters)
        scores = (6 if causal else 12) * self.score_width * decoder.sequence_length
        return 6.0 * matrices + scores * (decoder.num_layers + self.predicted)

    def with_sequence(self, tokens: int) -> ExpertShape:
        """The same for rows of `tokens` tokens.

        Args:
            tokens: Of a row.
        """
        return replace(self, decoder=self.decoder.with_sequence(tokens))

    def refusal(self) -> PlanError:
        """Why there is no plan for it."""
        experts = self.experts
        return PlanError(
            f"{self.name} has {experts.number} experts in a block, {experts.per_token} for each "
            f"token: {count(self.num_parameters)} parameters, {count(self.active_parameters)} of "
            "them for a token. pyops has no layer of experts and no expert parallelism (ep), so "
            "there is no layout to choose; ExpertShape counts parameters and operations, "
            "expert_state_bytes the states of a rank. Plan for a model without experts"
        )

    @classmethod
    def of_config(cls, values: Mapping[str, Any], *, name: str = "model") -> ExpertShape:
        """The shape that a config.json of transformers describes.

        Args:
            values: The contents of the file.
            name: What the tables call it.

        Raises:
            PlanError: The model is of a kind that is not counted, or has experts in some blocks
                only.
            HubError: A field is missing, or has a value of another type.
        """
        kind = values.get("model_type")
        if kind not in EXPERT_KINDS:
            raise PlanError(
                f"config.json has model_type {kind!r}; models with experts that are counted are "
                f"{', '.join(EXPERT_KINDS)}. Give the numbers, by ExpertShape()"
            )
        read = ConfigFields(values)
        bias = read.flag("attention_bias", kind == "gpt_oss")
        decoder = gated_decoder(read, qkv_bias=bias, name=name)
        if kind == "deepseek_v3":
            return cls(decoder, _of_deepseek(read), _latent(read, bias=bias))
        experts = Experts(
            number=read.integer("num_experts" if "num_experts" in read else "num_local_experts"),
            per_token=read.integer("num_experts_per_tok"),
            hidden=read.integer(
                "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
            ),
            bias=kind == "gpt_oss",
        )
        step = read.integer("decoder_sparse_step", 1)
        if step != 1 or read.raw("mlp_only_layers"):
            raise PlanError(
                f"config.json has decoder_sparse_step = {step}, mlp_only_layers = "
                f"{read.raw('mlp_only_layers')!r}: experts in some blocks only are not counted; "
                "give the numbers, by ExpertShape()"
            )
        return cls(
            decoder,
            experts,
            query_norms=kind == "qwen3_moe",
            sinks=kind == "gpt_oss",
            output_bias=bias,
        )

    @classmethod
    def of_folder(cls, path: Path | str) -> ExpertShape:
        """The shape of a Hugging Face folder, or of a config.json.

        Args:
            path: The folder or the file.

        Raises:
            PlanError: There is no such file, it is not JSON, or of an unknown kind.
        """
        values, name = config_values(path)
        return cls.of_config(values, name=name)


def decoder_of_folder(path: Path | str) -> ModelShape:
    """The shape of a Hugging Face folder's model that can be planned for.

    Args:
        path: Of the folder, or of its config.json.

    Raises:
        PlanError: The model has experts, with their counts; or as `ModelShape.of_folder`.
    """
    values, name = config_values(path)
    if values.get("model_type") in EXPERT_KINDS:
        raise ExpertShape.of_config(values, name=name).refusal()
    return ModelShape.of_config(values, name=name)


def _of_deepseek(read: ConfigFields) -> Experts:
    width = read.integer("moe_intermediate_size")
    return Experts(
        number=read.integer("n_routed_experts" if "n_routed_experts" in read else "num_experts"),
        per_token=read.integer("num_experts_per_tok"),
        hidden=width,
        shared=width * read.integer("n_shared_experts", 0, least=0),
        first=read.integer("first_k_dense_replace", 0, least=0),
    )


def _latent(read: ConfigFields, *, bias: bool) -> LatentAttention:
    if bias:
        raise PlanError(
            "config.json has attention_bias = True, which is not counted of a latent attention; "
            "give the numbers, by ExpertShape()"
        )
    return LatentAttention(
        query_rank=read.integer("q_lora_rank", 0, optional=True),
        kv_rank=read.integer("kv_lora_rank"),
        rotated=read.integer("qk_rope_head_dim"),
        plain=read.integer("qk_nope_head_dim"),
        values=read.integer("v_head_dim"),
    )
