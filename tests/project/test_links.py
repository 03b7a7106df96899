"""Links of the pages lead to files and headings that are there; no test opens other hosts'
pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.documents import pages
from tests.workers import ROOT

pytestmark = pytest.mark.cpu_only

LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub and MyST make of the headings of a page."""
    found = set()
    for heading in HEADING.findall(FENCED.sub("", text)):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def broken(path: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    for link in LINK.findall(FENCED.sub("", text)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+://", target):
            if not re.fullmatch(r"https://[\w.-]+\.[a-z]+(/\S*)?", target):
                wrong.append(link)
            continue
        other = (path.parent / target).resolve()
        if target and not other.exists():
            wrong.append(link)
            continue
        if anchor and anchor not in anchors(other.read_text() if target else text):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize(
    "page",
    [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"],
    ids=lambda page: page.name,
)
def test_links_lead_to_what_is_there(page):
    assert broken(page, page.read_text()) == []


def test_a_broken_link_is_found():
    page = ROOT / "docs" / "new.md"
    text = (
        "# A `B` head\n[a](zero.md) [b](zero.md#measured) [c](#a-b-head) "
        "[d](https://arxiv.org/abs/1)\n"
    )
    assert broken(page, text) == []
    for link in ("zeros.md", "zero.md#nowhere", "#nowhere", "https:/arxiv.org", "../README.txt"):
        assert broken(page, f"{text}[x]({link})\n") == [link]


def test_every_page_is_in_the_table_of_contents():
    listed = set(re.findall(r"^([a-z_]+)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE))
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} == listed
