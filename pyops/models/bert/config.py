"""BERTConfig: the shape of a BERT."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyops.models.config_checks import POSITIONS, check_config, check_pattern

__all__ = ["BERTConfig"]


@dataclass(frozen=True)
class BERTConfig:
    """The shape of a BERT.

    Raises:
        ValueError: Where a field has no sense, naming it and its value.
    """

    vocab_size: int = 30522
    """Number of words."""
    sequence_length: int = 512
    """Number of tokens that a sequence has at most."""
    num_layers: int = 12
    """Number of blocks."""
    num_heads: int = 12
    """Number of heads of attention."""
    dim: int = 768
    """Width of the model."""
    hidden: int = 0
    """Width inside the MLP; 0: 4 dim."""
    num_types: int = 2
    """Number of kinds of tokens: of the first and of the second sentence."""
    norm_eps: float = 1e-12
    """Added to the variance in norms."""
    activation: str = "gelu"
    """ "gelu" (with erf), "gelu_tanh" or "relu"."""
    positions: str = "learned"
    """ "learned", or "rotary" (Su et al., 2021)."""
    rotary_theta: float = 10000.0
    """Base of the frequencies of rotary positions."""
    tied_head: bool = True
    """The head's matrix is the table of the embedding."""
    pooled_head: bool = True
    """There is a head for pairs of sentences."""
    dropout: float = 0.0
    """Probability with which elements of the embedding and of what blocks add are dropped."""
    attention_dropout: float = 0.0
    """Probability with which attention weights are dropped."""
    pattern: str = ""
    """Which blocks of tokens attention sees: a text such as "BigBird(seed=1) | Longformer()", of
    the patterns of `pyops.attention` (or one of these itself, of which the text is kept); "":
    all."""
    pattern_block: int = 64
    """Tokens of a block's side, a multiple of 16."""

    def __post_init__(self) -> None:
        check_config(
            self,
            at_least_one=(
                "vocab_size",
                "sequence_length",
                "num_layers",
                "num_heads",
                "dim",
                "num_types",
            ),
            choices={"activation": ("gelu", "gelu_tanh", "relu"), "positions": POSITIONS},
        )
        check_pattern(self)

    @property
    def mlp_width(self) -> int:
        """`hidden`, or the usual width."""
        return self.hidden or 4 * self.dim

    def resolved(self) -> BERTConfig:
        """The same with every 0 that means a usual value replaced by it."""
        return replace(self, hidden=self.mlp_width)
