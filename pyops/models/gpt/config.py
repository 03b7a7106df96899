"""GPTConfig: the shape of a GPT."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pyops.models.config_checks import POSITIONS, check_config, check_pattern

__all__ = ["GPTConfig"]

CHOICES = {
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "gelu_tanh", "relu", "swiglu"),
    "positions": POSITIONS,
}


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Raises:
        ValueError: Where a field has no sense, naming it and its value.
    """

    vocab_size: int = 256
    """Number of words."""
    sequence_length: int = 256
    """Number of tokens that a sequence has at most."""
    num_layers: int = 4
    """Number of blocks."""
    num_heads: int = 4
    """Number of heads of attention."""
    num_kv_heads: int = 0
    """Number of heads of keys and values, each shared by as many of queries (Ainslie et al.,
    2023); 0: num_heads."""
    dim: int = 256
    """Width of the model."""
    head_dim: int = 0
    """Width of a head; 0: dim / num_heads."""
    hidden: int = 0
    """Width inside the MLP; 0: 4 dim, and for swiglu 8/3 dim rounded up to a multiple of 64,
    which has about as many weights (Shazeer, 2020, section 3)."""
    norm: str = "layernorm"
    """ "layernorm" or "rmsnorm"."""
    norm_eps: float = 1e-5
    """Added to the variance in norms."""
    activation: str = "gelu"
    """ "gelu" (with erf), "gelu_tanh", "relu" or "swiglu"."""
    positions: str = "learned"
    """ "learned", or "rotary" (Su et al., 2021)."""
    rotary_theta: float = 10000.0
    """Base of the frequencies of rotary positions."""
    rotary_stretch: float = 1.0
    """As in Llama 3.1, for a model that was trained on rotary_length tokens: how much slower
    the pairs turn that turn less than rotary_low times over them."""
    rotary_low: float = 1.0
    """See rotary_stretch."""
    rotary_high: float = 4.0
    """Pairs that turn more often over rotary_length tokens are not slowed down."""
    rotary_length: int = 8192
    """Number of tokens of the training before the stretch."""
    tied_head: bool = True
    """The head's matrix is the table of the embedding."""
    bias: bool = True
    """Linear layers and layer norms have biases."""
    dropout: float = 0.0
    """Probability with which elements of the embedding and of what blocks add are dropped."""
    attention_dropout: float = 0.0
    """Probability with which attention weights are dropped."""
    pattern: str = ""
    """Which blocks of tokens attention sees: a text such as "BigBird(seed=1) | Longformer()", of
    the patterns of `pyops.attention` (or one of these itself, of which the text is kept); "": all
    up to a token's own."""
    pattern_block: int = 64
    """Tokens of a block's side, a multiple of 16."""

    def __post_init__(self) -> None:
        check_config(
            self,
            at_least_one=("vocab_size", "sequence_length", "num_layers", "num_heads", "dim"),
            choices=CHOICES,
        )
        if (
            not self.rotary_stretch >= 1.0
            or not 0.0 < self.rotary_low < self.rotary_high
            or self.rotary_length < 1
        ):
            raise ValueError(
                f"rotary_stretch is {self.rotary_stretch}, rotary_low {self.rotary_low}, "
                f"rotary_high {self.rotary_high}, "
                f"rotary_length {self.rotary_length}; they must be 1 or more, above 0, "
                "above rotary_low, and 1 or more"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}, which does not divide num_heads = "
                f"{self.num_heads}; change one of them"
            )
        check_pattern(self)

    @property
    def kv_heads(self) -> int:
        """`num_kv_heads`, or the usual number."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """K: `head_dim`, or the usual width."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def mlp_width(self) -> int:
        """F: `hidden`, or the usual width for the activation."""
        if self.hidden:
            return self.hidden
        return (
            64 * math.ceil(8 * self.dim / 3 / 64) if self.activation == "swiglu" else 4 * self.dim
        )

    def resolved(self) -> GPTConfig:
        """The same with every 0 that means a usual value replaced by it."""
        return replace(
            self, hidden=self.mlp_width, num_kv_heads=self.kv_heads, head_dim=self.head_width
        )
