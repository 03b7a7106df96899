"""The fields of a config.json, each of the type that is asked for: the file may be of another
version, or be damaged.

    fields.integer("n_layer", of="tensors")
        config.json has n_layer = '2'; it must be a whole number
    fields.fixed(scale_attn_weights=True)
        config.json has scale_attn_weights = False, pyops computes True only

Sizes are compared with what the files hold before anything of such a size is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pyops.hub.folder_files import HubError

__all__ = ["ConfigFields"]

REQUIRED: Any = object()
MOST_POSITIONS = 1 << 24  # of a table of angles, which is computed: 8 GiB for heads of 128


def shown(value: Any) -> str:
    """A value as a message shows it."""
    return repr(value)[:80]


class ConfigFields:
    """What config.json says, read by key and type. HubError names the key, its value and what was
    expected.

    Args:
        numbers, tensors: How many the files hold in all, which bounds every size; None: of a model
            that is there already.
    """

    def __init__(
        self, values: Mapping[str, Any], *, numbers: int | None = None, tensors: int | None = None
    ) -> None:
        self._values = values
        self._most = {"numbers": numbers, "tensors": tensors}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def _refuse(self, key: str, expected: str) -> HubError:
        if key not in self._values:
            return HubError(
                f"config.json lacks {key}, {expected}; it is of another model, or "
                "damaged: fetch it again"
            )
        return HubError(
            f"config.json has {key} = {shown(self._values[key])}; it must be {expected}"
        )

    def _value(self, key: str, default: Any, optional: bool, expected: str) -> Any:
        """The value; the default for a key that is not there, or, where it is optional, null."""
        if key not in self._values or (optional and self._values[key] is None):
            if default is REQUIRED:
                raise self._refuse(key, expected)
            return default
        return self._values[key]

    def integer(
        self,
        key: str,
        default: Any = REQUIRED,
        *,
        least: int = 1,
        optional: bool = False,
        of: str = "numbers",
        most: int | None = None,
    ) -> Any:
        """A whole number, `least` or more.

        Args:
            of: What it can't be more than, unless `most` says: of "numbers" or "tensors".
        """
        expected = f"a whole number, {least} or more"
        found = self._value(key, default, optional, expected)
        if found is default:
            return found
        if type(found) is not int or found < least:
            raise self._refuse(key, expected)
        limit = self._most[of] if most is None else most
        if limit is not None and found > limit:
            why = (
                f"the files hold {limit} {of} in all"
                if most is None
                else f"pyops takes at most {limit}"
            )
            raise HubError(
                f"config.json has {key} = {found}, but {why}; it is of another model, or damaged"
            )
        return found

    def positions(self, key: str) -> int:
        """How many positions a table of angles has, which no tensor of the files shows."""
        found: int = self.integer(key, most=MOST_POSITIONS)
        return found

    def number(
        self,
        key: str,
        default: Any = REQUIRED,
        *,
        above: float = 0.0,
        equal: bool = False,
        below: float = math.inf,
        optional: bool = False,
    ) -> Any:
        """A finite number above `above`, or equal to it where that says so, and less than
        `below`."""
        bound = f"{above:g} or more" if equal else f"more than {above:g}"
        expected = f"a number, {bound}" + (f" and less than {below:g}" if below < math.inf else "")
        found = self._value(key, default, optional, expected)
        if found is default:
            return found
        sound = (
            type(found) in (int, float)
            and abs(found) < 1e300
            and (found > above or (equal and found == above))
        )
        if not sound or not found < below:
            raise self._refuse(key, expected)
        return float(found)

    def probability(self, key: str, default: float) -> float:
        """Of dropout; null is none of it."""
        if key in self._values and self._values[key] is None:
            return 0.0
        found: float = self.number(key, default, equal=True, below=1.0)
        return found

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        found = self._value(key, default, False, "true or false")
        if type(found) is not bool:
            raise self._refuse(key, "true or false")
        return found

    def choice(self, key: str, known: Mapping[str, str], default: str) -> str:
        """What `known` says of the field's text."""
        found = self._values.get(key, default)
        if not isinstance(found, str) or found not in known:
            raise HubError(f"config.json has {key} = {shown(found)}; pyops has {', '.join(known)}")
        return known[found]

    def section(self, key: str) -> Mapping[str, Any] | None:
        """An object, or None where it is null or not there."""
        found = self._values.get(key)
        if found is not None and not isinstance(found, Mapping):
            raise self._refuse(key, "an object")
        return found

    def raw(self, key: str, default: Any = None) -> Any:
        """As it stands there."""
        return self._values.get(key, default)

    def within(self, section: Mapping[str, Any]) -> ConfigFields:
        """The fields of an object that stands in this one."""
        return ConfigFields(section, **self._most)

    def fixed(self, **wanted: Any) -> None:
        """HubError when a field is set to something else than the one value that we compute."""
        for key, value in wanted.items():
            if key in self._values and (
                self._values[key] != value or type(self._values[key]) is not type(value)
            ):
                raise HubError(
                    f"config.json has {key} = {shown(self._values[key])}, pyops computes "
                    f"{value!r} only; choose another "
                    "checkpoint"
                )
