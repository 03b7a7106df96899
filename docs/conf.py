"""How Sphinx makes the pages of docs/ and the API reference: `make docs`.

The pages are Markdown (MyST). The reference has one page for each subpackage, of what its
`__all__` names, with the docstrings as they stand (Google style).
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pyops  # noqa: E402

project = "pyops"
release = pyops.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
default_role = "literal"  # `name` in a docstring
html_theme = "furo"
html_title = "pyops"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # fields have docstrings of their own, too
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = [
    "myst.xref_missing",  # links to sources, which the site does not hold
    "ref.python",  # a field's name that several classes have
]

NAME = re.compile(r"(`[^`\n]+`)(\w?)")  # in `Later`s reStructuredText needs a mark before the s
MARKUP = re.compile(r"[*|]|(?<=\w)_(?!\w)")  # docstrings are plain text with `names`
COLUMNS = re.compile(r"\S {3,}\S")  # a line of a table or picture
API = Path(__file__).parent / "api"
DEEPEST = 2  # titles of pages in the sidebar: of the reference, and of its subpackages
SOURCE_TREES: dict[int, str] = {}


def write_reference(app: Any) -> None:
    """Write api/<subpackage>.rst for each subpackage, and the list of them.

    A name that two subpackages offer is indexed under the one that defines it.
    """
    API.mkdir(exist_ok=True)
    pages = []
    for room in sorted(pyops._ROOMS):
        module = importlib.import_module(f"pyops.{room}")
        title = f"pyops.{room}"
        lines = [title, "=" * len(title), "", f".. automodule:: {title}", "   :no-members:", ""]
        for name in module.__all__:
            value = getattr(module, name)
            defined = getattr(value, "__module__", title) or title
            if isinstance(value, type(sys)):
                kind = "module"
            elif isinstance(value, type):
                kind = "class"
            elif callable(value):
                kind = "function"
            else:
                kind = "data"
            lines += [f".. auto{kind}:: {title}.{name}"]
            if kind in ("class", "module"):
                lines += ["   :members:"]
            if defined.split(".")[1:2] != [room]:
                lines += ["   :no-index:"]
            lines += [""]
        (API / f"{room}.rst").write_text("\n".join(lines))
        pages.append(f"   {room}")
    heading = ["API reference", "=============", "", ".. toctree::", "   :maxdepth: 1", ""]
    (API / "index.rst").write_text("\n".join([*heading, *pages, ""]))


def _with_mark(name: re.Match[str]) -> str:
    quoted, letter = name.groups()
    return f"{quoted}\\ {letter}" if letter else quoted


def show_pictures(
    app: Any, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Mark as literal what a docstring indents after a blank line, and paragraphs in columns:
    pictures, tables, programs."""
    if (
        what == "module"
    ):  # its lines begin at column 0, so that dedenting would take a picture's indent
        lines[:] = [*str(obj.__doc__).expandtabs().splitlines(), ""]
    shown: list[str] = []
    indent = 0  # of the last line of prose
    picture: int | None = None
    columns = False  # whether this paragraph is in columns
    for number, line in enumerate(lines):
        depth = len(line) - len(line.lstrip())
        after_blank = not shown or not shown[-1].strip()
        if not line.strip():
            columns = False
        elif picture is None and after_blank and depth == indent:
            paragraph = itertools.takewhile(str.strip, lines[number:])
            columns = any(COLUMNS.search(each) for each in paragraph)
            if columns:
                shown += [" " * indent + ".. code-block:: text", ""]
        if columns:
            line = "    " + line
        elif line.strip():
            if picture is not None and depth < picture:
                picture = None
            if picture is None and after_blank and depth >= indent + 4:
                shown += [" " * indent + ".. code-block:: text", ""]
                picture = depth
            if picture is None:
                indent = depth
                line = NAME.sub(_with_mark, MARKUP.sub(r"\\\g<0>", line))
        shown.append(line)
    lines[:] = shown


def shorten_navigation(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Make the tree of pages in the sidebar from their titles alone, and once for all sources of
    one depth, which are most pages: Sphinx would copy all names of the reference for each."""
    make = context["toctree"]

    def tree(**options: Any) -> str:
        options["maxdepth"] = DEEPEST
        if not page.startswith("_modules/"):
            return str(make(**options))
        depth = page.count("/")  # from which links to other pages follow
        if depth not in SOURCE_TREES:
            SOURCE_TREES[depth] = make(**options)
        return SOURCE_TREES[depth]

    context["toctree"] = tree


def setup(app: Any) -> None:
    app.connect("builder-inited", write_reference)
    app.connect("html-page-context", shorten_navigation, priority=100)  # before the theme
    app.connect("autodoc-process-docstring", show_pictures, priority=100)  # before napoleon
