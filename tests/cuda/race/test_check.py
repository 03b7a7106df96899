"""Which parts of the race checker its arguments choose."""

from __future__ import annotations

import pytest

from tests.cuda.race.check import CHECKS, FAMILIES, MEETINGS, chosen_of, main, sites

pytestmark = pytest.mark.cpu_only


def test_arguments() -> None:
    everything = (list(CHECKS), [*FAMILIES, *MEETINGS], list(sites()))
    assert chosen_of([]) == everything
    assert chosen_of(["asan", "tsan"])[0] == ["tsan", "asan"]
    place = next(iter(sites()))
    assert chosen_of(["codecs", "mutants", place]) == (["mutants"], ["codecs"], [place])


@pytest.mark.parametrize("word", ["tsam", "codec", "reduce.cuh:1"])
def test_an_unknown_argument(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=f"{word}: no check"):
        chosen_of(["tsan", word])
    assert main(["tsan", word]) == 2
    assert f"{word}: no check" in capsys.readouterr().err
