"""T5Config: the shape of a T5."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyops.models.config_checks import ACTIVATIONS, check_config

__all__ = ["T5Config"]

MOST_DISTANCE = 1 << 20  # a table of the buckets of all distances is made


@dataclass(frozen=True)
class T5Config:
    """The shape of a T5.

    Raises:
        ValueError: Where a field has no sense, naming it and its value.
    """

    vocab_size: int = 32128
    """Number of words."""
    num_layers: int = 6
    """Number of blocks of the encoder."""
    num_decoder_layers: int = 0
    """Number of blocks of the decoder; 0: num_layers."""
    num_heads: int = 8
    """Number of heads of attention."""
    dim: int = 512
    """Width of the model."""
    head_dim: int = 0
    """Width of a head; 0: dim / num_heads."""
    hidden: int = 0
    """Width inside the MLP; 0: 4 dim."""
    num_buckets: int = 32
    """Number of buckets of relative positions, even, 4 or more."""
    max_distance: int = 128
    """Relative positions from here on share a bucket."""
    norm_eps: float = 1e-6
    """Added to the variance in norms."""
    activation: str = "relu"
    """ "relu", "gelu", "gated_gelu" or "swiglu"."""
    tied_head: bool = True
    """The head's matrix is the table of the embedding."""
    scaled_head: bool = True
    """The input of the head is scaled by dim^-1/2."""
    start_token: int = 0
    """The token that the decoder sees before its first target."""
    dropout: float = 0.0
    """Probability with which elements are dropped: of embeddings, inside the MLP, of what
    blocks add, and of the results of encoder and decoder."""
    attention_dropout: float = 0.0
    """Probability with which attention weights are dropped."""

    def __post_init__(self) -> None:
        check_config(
            self,
            at_least_one=("vocab_size", "num_layers", "num_heads", "dim", "max_distance"),
            choices={"activation": ("relu", "gelu", "gated_gelu", "swiglu")},
        )
        if self.num_decoder_layers < 0:
            raise ValueError(
                f"num_decoder_layers is {self.num_decoder_layers}; give a number, or 0 "
                "for as many as num_layers"
            )
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise ValueError(f"num_buckets is {self.num_buckets}; it must be even, 4 or more")
        if not self.num_buckets // 2 < self.max_distance <= MOST_DISTANCE:
            raise ValueError(
                f"max_distance is {self.max_distance}; it must be more than num_buckets / 2 = "
                f"{self.num_buckets // 2}, distances that have buckets of their own, and at most "
                f"{MOST_DISTANCE}"
            )
        if not 0 <= self.start_token < self.vocab_size:
            raise ValueError(
                f"start_token is {self.start_token}, outside the vocabulary of {self.vocab_size}"
            )

    @property
    def mlp_width(self) -> int:
        """`hidden`, or the usual width."""
        return self.hidden or 4 * self.dim

    @property
    def head_width(self) -> int:
        """`head_dim`, or the usual width."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return ACTIVATIONS[self.activation].gated

    def resolved(self) -> T5Config:
        """The same with every 0 that means a usual value replaced by it."""
        layers = self.num_decoder_layers or self.num_layers
        return replace(
            self, hidden=self.mlp_width, head_dim=self.head_width, num_decoder_layers=layers
        )
