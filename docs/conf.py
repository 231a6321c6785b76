"""Sphinx configuration. Nothing is fetched: references to other projects stay plain text."""

import textwrap
from importlib.metadata import version as _version
from typing import Any

project = "aioshm"
author = "The aioshm authors"
copyright = "The aioshm authors"  # noqa: A001 - Sphinx's name for it
release = _version("aioshm")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"aioshm {release}"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "groupwise"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
# "Cancellation" is a section of its own in this project's docstrings.
napoleon_custom_sections = [("Cancellation", "notes_style")]
napoleon_google_docstring = True
napoleon_numpy_docstring = False

default_role = "code"  # docstrings write `name`, as Markdown does

# The build is nitpicky about this package's names; the inventories of others would be fetched.
# What is private has no page of its own.
nitpick_ignore_regex = [(r"py:.*", r"(?!aioshm\b).*"), (r"py:.*", r"aioshm\._.*")]


def code_blocks(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Turn fenced code of a docstring, which editors show well, into what autodoc reads."""
    out: list[str] = []
    fenced = False
    for line in lines:
        text = line.strip()
        if text.startswith("```"):
            fenced = not fenced
            indent = line[: line.index("`")]
            out += [f"{indent}.. code-block:: {text[3:] or 'text'}", ""] if fenced else [""]
        else:
            out.append(textwrap.indent(line, "   ") if fenced else line)
    lines[:] = out


def setup(app: Any) -> None:
    """Run before napoleon, which would take an example's parts for sections."""
    app.connect("autodoc-process-docstring", code_blocks, priority=400)
