"""ModelShape: a decoder as numbers: parameters, operations of a token, and what it is made of.

    block    attention h (a + 2 k) w + a w h   MLP 2 h f, or 3 h f where it is gated   two norms
    ends     embedding V h, positions s h      last norm, head V h unless tied

h width, a heads of width w, k heads of keys and values, f width inside the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pyops.hub.config_fields import ConfigFields
from pyops.models import GPTConfig
from pyops.plan.shapes.numbers import PlanError, check_whole, config_values

__all__ = ["EXPERT_KINDS", "ModelShape", "gated_decoder"]


# What a config.json of transformers calls the sizes, by its model_type. These have blocks of an
# attention and an MLP, one behind the other, and no experts.
GATED = ("llama", "mistral", "qwen2")
BIASED_QUERIES = ("qwen2",)
KINDS = ("gpt2", *GATED)
EXPERT_KINDS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""The model_type of a config.json of transformers that `ExpertShape.of_config` reads."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder of equal blocks.

    Raises:
        PlanError: For a size that makes no sense.
    """

    num_layers: int
    """Blocks."""
    dim: int
    """Width of the model."""
    num_heads: int
    """Heads of attention."""
    vocab_size: int
    """Rows of the embedding."""
    sequence_length: int
    """Tokens of a row."""
    num_kv_heads: int = 0
    """Heads of keys and values; 0: as many as of queries."""
    head_dim: int = 0
    """Width of a head; 0: dim / num_heads."""
    hidden: int = 0
    """Width inside the MLP; 0: 4 dim."""
    gated: bool = False
    """Whether the MLP has a gate, as in Llama: three matrices."""
    bias: bool = True
    """Whether linear layers, and layer norms, have biases."""
    rms_norm: bool = False
    """Whether norms are RMSNorm, which have weights alone and no mean."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases where nothing else has."""
    tied_head: bool = True
    """Whether the head is the table of the embedding."""
    learned_positions: bool = True
    """Whether there is a table of positions."""
    name: str = "model"
    """What the tables call it."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "dim", "num_heads", "vocab_size", "sequence_length"):
            check_whole(name, getattr(self, name), 1)
        for name in ("num_kv_heads", "head_dim", "hidden"):
            check_whole(name, getattr(self, name), 0)
        if not self.head_dim and self.dim % self.num_heads:
            raise PlanError(
                f"num_heads is {self.num_heads}, which does not divide dim = {self.dim}; change "
                "one of them, or give head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise PlanError(
                f"num_kv_heads is {self.num_kv_heads}, which does not divide num_heads = "
                f"{self.num_heads}; change one of them"
            )

    @property
    def unit(self) -> str:
        """What a row has, in short."""
        return "tok"

    @property
    def rows(self) -> str:
        """What the rows of a step are, for a text."""
        return f"rows of {self.sequence_length} tokens"

    @property
    def convention(self) -> str:
        """What `operations` counts."""
        return "6 (N - E) + 12 L a w s operations a token, causal masks not halved"

    @property
    def kv_heads(self) -> int:
        """`num_kv_heads`, or the usual number."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """`head_dim`, or the usual width."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def inner(self) -> int:
        """`hidden`, or the usual width."""
        return self.hidden or 4 * self.dim

    @property
    def query_width(self) -> int:
        """Of the queries of all heads together."""
        return self.num_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Of the keys of all heads together; values are as wide."""
        return self.kv_heads * self.head_width

    @property
    def block_matrices(self) -> int:
        """Elements of a block's matrices, which tensor parallelism cuts."""
        attention = self.dim * (self.query_width + 2 * self.kv_width) + self.query_width * self.dim
        return attention + (3 if self.gated else 2) * self.dim * self.inner

    @property
    def block_parameters(self) -> int:
        """Of a block, norms and biases with it."""
        found = self.block_matrices + 2 * self.norm_parameters
        if self.bias or self.qkv_bias:
            found += self.query_width + 2 * self.kv_width
        if self.bias:
            found += self.dim + (2 if self.gated else 1) * self.inner + self.dim
        return found

    @property
    def norm_parameters(self) -> int:
        """Of one norm."""
        return (2 if self.bias and not self.rms_norm else 1) * self.dim

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, with the table of positions where there is one."""
        positions = self.sequence_length * self.dim if self.learned_positions else 0
        return self.vocab_size * self.dim + positions

    @property
    def head_parameters(self) -> int:
        """Of the head's matrix, though it may be the embedding's."""
        return self.vocab_size * self.dim

    @property
    def num_parameters(self) -> int:
        """Of the whole model, a tied table once."""
        ends = self.embedding_parameters + self.norm_parameters
        own_head = 0 if self.tied_head else self.head_parameters
        return self.num_layers * self.block_parameters + ends + own_head

    def operations(self, *, causal: bool = False) -> float:
        """Model operations of a token, forward and backward: 6 (N - E) + 12 L a w s.

        Args:
            causal: Count the scores that a causal mask leaves only: 6 L a w s.
        """
        matrices = self.num_parameters - self.embedding_parameters
        if self.tied_head:
            matrices += self.head_parameters
        scores = (6 if causal else 12) * self.num_layers * self.query_width * self.sequence_length
        return 6.0 * matrices + scores

    def with_sequence(self, tokens: int) -> ModelShape:
        """The same for rows of `tokens` tokens.

        Args:
            tokens: Of a row.

        Raises:
            PlanError: A table of positions is shorter.
        """
        check_whole("sequence_length", tokens, 1)
        if self.learned_positions and tokens > self.sequence_length:
            raise PlanError(
                f"sequence_length is {tokens}, but the table of positions has "
                f"{self.sequence_length}; ask for that many tokens or fewer"
            )
        return replace(self, sequence_length=tokens)

    def gpt_config(self, *, tp: int = 1, num_layers: int = 0) -> GPTConfig:
        """A GPT of pyops with these sizes, or what a rank of tensor parallelism has of it.

        Args:
            tp: How many ranks cut the heads, the MLP and the vocabulary.
            num_layers: Blocks; 0: all.
        """
        return GPTConfig(
            vocab_size=-(-self.vocab_size // tp),
            sequence_length=self.sequence_length,
            num_layers=num_layers or self.num_layers,
            num_heads=self.num_heads // tp,
            num_kv_heads=self.kv_heads // tp,
            head_dim=self.head_width,
            dim=self.dim,
            hidden=self.inner // tp,
            norm="rmsnorm" if self.rms_norm else "layernorm",
            activation="swiglu" if self.gated else "gelu",
            positions="learned" if self.learned_positions else "rotary",
            tied_head=self.tied_head,
            bias=self.bias,
        )

    @classmethod
    def of_gpt(cls, config: GPTConfig, *, name: str = "GPT") -> ModelShape:
        """The shape of a GPT of pyops.

        Args:
            config: Of the model.
            name: What the tables call it.
        """
        return cls(
            num_layers=config.num_layers,
            dim=config.dim,
            num_heads=config.num_heads,
            vocab_size=config.vocab_size,
            sequence_length=config.sequence_length,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_width,
            hidden=config.mlp_width,
            gated=config.activation == "swiglu",
            bias=config.bias,
            rms_norm=config.norm == "rmsnorm",
            tied_head=config.tied_head,
            learned_positions=config.positions == "learned",
            name=name,
        )

    @classmethod
    def of_config(cls, values: Mapping[str, Any], *, name: str = "model") -> ModelShape:
        """The shape that a config.json of transformers describes.

        Args:
            values: The contents of the file.
            name: What the tables call it.

        Raises:
            PlanError: The model is of a kind whose costs are not known.
            HubError: A field is missing, or has a value of another type.
        """
        kind = values.get("model_type")
        if kind in EXPERT_KINDS:
            raise PlanError(
                f"config.json has model_type {kind!r}, whose blocks have experts: pyops has no "
                "layer of experts and no expert parallelism (ep), so there is no layout to choose; "
                "ExpertShape.of_config counts parameters and operations"
            )
        if kind not in KINDS:
            raise PlanError(
                f"config.json has model_type {kind!r}, whose costs are not known; known are "
                f"{', '.join(KINDS)}. Give the sizes as numbers, by ModelShape(), or a "
                "GPT of pyops in a TOML file; of any other module profile the layers, by "
                "pyops.pipeline.profile, and plan with ProfiledCosts"
            )
        read = ConfigFields(values)
        if kind == "gpt2":
            return cls(
                num_layers=read.integer("n_layer"),
                dim=read.integer("n_embd"),
                num_heads=read.integer("n_head"),
                vocab_size=read.integer("vocab_size"),
                sequence_length=read.integer("n_positions"),
                hidden=read.integer("n_inner", 0, optional=True),
                name=name,
            )
        return gated_decoder(read, qkv_bias=kind in BIASED_QUERIES, name=name)

    @classmethod
    def of_folder(cls, path: Path | str) -> ModelShape:
        """The shape of a Hugging Face folder, or of a config.json.

        Args:
            path: The folder or the file.

        Raises:
            PlanError: There is no such file, it is not JSON, or of an unknown kind.
        """
        values, name = config_values(path)
        return cls.of_config(values, name=name)

    @classmethod
    def of_numbers(cls, values: Mapping[str, Any]) -> ModelShape:
        """The shape with fields of these names, as a table of TOML or JSON has them.

        Args:
            values: {field: value}.

        Raises:
            PlanError: For a field that there is not, that is missing, or of another type.
        """
        known = {field.name: field for field in fields(cls)}
        if strange := sorted(set(values) - set(known)):
            raise PlanError(
                f"a model has no {strange[0]} = {values[strange[0]]!r}; it has {', '.join(known)}"
            )
        needed = ("num_layers", "dim", "num_heads", "vocab_size", "sequence_length")
        if missing := [name for name in needed if name not in values]:
            raise PlanError(f"a model needs {missing[0]}; give it a whole number, 1 or more")
        for key, value in values.items():
            kind = {"int": int, "bool": bool, "str": str}[str(known[key].type)]
            if type(value) is not kind:
                raise PlanError(f"{key} is {value!r}; it must be of type {kind.__name__}")
        return cls(**values)


def gated_decoder(read: ConfigFields, *, qkv_bias: bool, name: str) -> ModelShape:
    """The shape of a Llama and what is like it, by its config.json.

    Args:
        read: The file.
        qkv_bias: Whether queries, keys and values have biases.
        name: What the tables call it.

    Raises:
        HubError: A field is missing, or has a value of another type.
    """
    heads = read.integer("num_attention_heads")
    return ModelShape(
        num_layers=read.integer("num_hidden_layers"),
        dim=read.integer("hidden_size"),
        num_heads=heads,
        vocab_size=read.integer("vocab_size"),
        sequence_length=read.positions("max_position_embeddings"),
        num_kv_heads=read.integer("num_key_value_heads", heads, optional=True),
        head_dim=read.integer("head_dim", 0, optional=True),
        hidden=read.integer("intermediate_size"),
        gated=True,
        bias=False,
        rms_norm=True,
        qkv_bias=qkv_bias,
        tied_head=read.flag("tie_word_embeddings", False),
        learned_positions=False,
        name=name,
    )
