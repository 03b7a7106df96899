"""Texts that follow prompts, and how likely texts are: `generate`, `score`, and `sample` for one
text of any length."""

from pyops.models.generation.generating import generate
from pyops.models.generation.options import GenerateOptions
from pyops.models.generation.rows import GeneratedRow
from pyops.models.generation.sampling import sample
from pyops.models.generation.scoring import score

__all__ = ["GenerateOptions", "GeneratedRow", "generate", "sample", "score"]
