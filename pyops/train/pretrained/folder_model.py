"""FolderModel: what a Hugging Face folder says of its model, and the trainer of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyops.comm.agreement import on_first_rank, ranks_agree
from pyops.config import ConfigError
from pyops.config.run_plan import with_keys_of_a_run
from pyops.data.folder_text import FolderTokenizer
from pyops.hub.folder_files import HubError, open_weights, read_config
from pyops.mesh import Mesh
from pyops.parallel import ParallelPlan, Trainer, parallelize

__all__ = ["FolderModel"]

CAUSAL = ("ForCausalLM", "LMHeadModel")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
# What of config.json may differ between two saves of one model.
OF_THE_SAVE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")


@dataclass(frozen=True)
class FolderModel:
    """A folder with a language model that predicts the next token, and its tokenizer.

    Attributes:
        folder: As given.
        tokenizer: Of the folder.
        fields: What its config.json says, of numbers and words.
        num_parameters: As the files have them.
        eos_token_ids: The tokens that end a text, those of the folder's generation_config.json
            among them.
    """

    folder: str
    tokenizer: FolderTokenizer
    fields: dict[str, Any]
    num_parameters: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, folder: str) -> FolderModel:
        """Read all but the weights. A collective.

        Raises:
            ConfigError, CorpusError: On every rank alike, for a folder that can't be used.
        """
        try:
            num_parameters = on_first_rank(lambda: _num_parameters(folder))
            with ranks_agree():
                values = read_config(folder)
                _check_class(folder, values)
                tokenizer = FolderTokenizer(folder)
                text = values.get("text_config", {})
                flat = {**(text if isinstance(text, dict) else {}), **values}
                fields = {
                    key: value
                    for key, value in flat.items()
                    if isinstance(value, bool | int | float | str) and key not in OF_THE_SAVE
                }
                if isinstance(vocab_size := flat.get("vocab_size"), int):
                    tokenizer.check_vocabulary(vocab_size)
                ends = _ends(folder, flat, tokenizer)
        except HubError as error:
            raise ConfigError(str(error)) from None
        return cls(folder, tokenizer, fields, num_parameters, ends)

    def check_length(self, length: int, what: str, fix: str) -> None:
        """Refuse texts that are longer than the model has positions.

        Args:
            length: In tokens.
            what: Where it comes from.
            fix: How it is made shorter.

        Raises:
            ConfigError: The model has fewer.
        """
        for key in POSITIONS:
            most = self.fields.get(key)
            if isinstance(most, int) and 0 < most < length:
                raise ConfigError(
                    f"{what}, but the model of {self.folder} has {most} positions ({key} in "
                    f"config.json): {fix}"
                )

    def trainer(
        self,
        plan: ParallelPlan,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] | None,
        mesh: Mesh | None = None,
        seed: int = 0,
        device: torch.device,
        changed: Callable[[], Any] | None = None,
        loss: Any = None,
    ) -> Trainer:
        """The model, shared out over the ranks. A collective.

        Args:
            plan, optimizer, mesh, seed, device, loss: As of `parallelize`.
            changed: Makes the module that is trained in place of the folder's model, the same on
                every rank, each of which reads the folder whole then; None: nothing.

        Raises:
            ConfigError: On every rank alike, for a plan that does not fit the model.
        """
        try:
            model: Any = self.folder
            if changed is not None:
                with ranks_agree():
                    model = changed()
            return parallelize(
                model, plan, optimizer=optimizer, mesh=mesh, loss=loss, seed=seed, device=device
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self.folder}: {with_keys_of_a_run(error)}") from None


def _num_parameters(folder: str) -> int:
    read_config(folder)  # whose message, where there is no such folder, says more
    with open_weights(folder) as weights:
        return sum(math.prod(shape) for shape in weights.shapes.values())


def _check_class(folder: str, values: dict[str, Any]) -> None:
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and not name.endswith(CAUSAL):
        raise ConfigError(
            f"{folder} has a {name}, which does not predict the token that follows; "
            "name a folder of a causal language model (...ForCausalLM)"
        )


def _ends(folder: str, values: dict[str, Any], tokenizer: FolderTokenizer) -> tuple[int, ...]:
    """The tokens that end a text, those of generation_config.json first."""
    found: list[int] = []
    path = Path(folder) / "generation_config.json"
    generation = _read_object(path) if path.exists() else {}
    for given in (generation.get("eos_token_id"), values.get("eos_token_id")):
        found += [given] if isinstance(given, int) else given if isinstance(given, list) else []
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(each for each in found if isinstance(each, int)))


def _read_object(path: Path) -> dict[str, Any]:
    """A file of one JSON object.

    Raises:
        HubError: It is damaged.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise HubError(f"{path} is damaged ({error}); fetch it again") from None
    if not isinstance(found, dict):
        raise HubError(f"{path} is damaged (it holds no object); fetch it again")
    return found
