"""Renders the pages of all benchmarks: a Markdown page and a picture, from stored results and a template.

The template of a page is a file in `benchmarks/pages/`. A benchmark supplies a text or None for each placeholder:

    {name}   is replaced by the text
    {name?}  is removed; it only decides whether its paragraph or section is left out

A paragraph, table or list item is left out if one of its placeholders has no text. If a placeholder in a heading has no
text, the whole section is left out.

Invariant: `render` and `draw` are pure functions of the stored results. `write` and `render_again` do the I/O.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks.machine import ROOT, Machine
from benchmarks.measures import FLOOR_TOLERANCE_RATIO, is_busy
from benchmarks.rows import BUSY, Row
from control_plane.contract.markdown import wrap

DOCS = ROOT / "docs"
TEMPLATES = Path(__file__).parent / "pages"
PLACEHOLDER = re.compile(r"( ?)\{(\w+)(\??)\}")
TITLE = "# Benchmarks\n"
QUICK = "**This was a quick run with few samples. Its values count for nothing.**"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRun:
    """The results that all benchmark runs have in common. Each benchmark has a subclass with its measured values."""

    machine: Machine
    is_quick: bool
    seconds: float

    @property
    def is_busy(self) -> bool:
        """True if the machine was busy at the start, so that all values are inconclusive."""
        return is_busy(self.machine.load_average[0], self.machine.cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Description of one benchmark's page in `docs/`: its files, and the functions that turn results into texts."""

    name: str
    """Name of the template file, which is also part of the file names of the results and of the page."""
    command: str
    """The command that measures, such as `make bench-api`."""
    run: type[Any]
    """The dataclass of the results, a subclass of `BenchmarkRun`."""
    values: Callable[[Any], Mapping[str, str | None]]
    """Returns the text of each placeholder of the template."""
    rows: Callable[[Any], Sequence[Row]] = lambda _: ()
    """Returns the rows. Their verdicts (whether each value meets its limit) determine the exit code."""
    draw: Callable[[Any], str | None] = lambda _: None
    """Returns the SVG document; None for a page without a picture."""
    picture: str = ""
    """Alternative text of the page's picture, for readers who cannot see it."""
    is_section: bool = False
    """True if the page is a section of `docs/benchmarks.md`."""

    @property
    def results(self) -> Path:
        """Path of the JSON file with the results, in `docs/`."""
        return DOCS / f"benchmarks-{self.name}.json"

    @property
    def document(self) -> Path:
        """Path of the Markdown file that contains the page."""
        return DOCS / ("benchmarks.md" if self.is_section else f"benchmarks-{self.name}.md")

    @property
    def template(self) -> str:
        """Text of the page's template file."""
        return (TEMPLATES / f"{self.name}.md").read_text()


def write(page: Page, run: BenchmarkRun, results: Path, document: Path) -> None:
    """Write the results, the page and its picture.

    The picture has the file name of the results, with a different suffix.

    Args:
        page: the benchmark's page.
        run: the results.
        results: path of the JSON file.
        document: path of the Markdown file. Other sections of an existing file do not change.
    """
    for path in (results, document):
        path.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(dataclasses.asdict(run), indent=1) + "\n")
    render_again(page, results, document)


def render_again(page: Page, results: Path, document: Path) -> None:
    """Write the page and its picture from stored results, without measuring."""
    before = document.read_text() if document.exists() else ""
    run = load(page, results)
    document.write_text(render(page, run, before, results.name))
    picture = page.draw(run)
    if picture is not None:
        document.with_name(results.with_suffix(".svg").name).write_text(picture)


def load(page: Page, results: Path) -> Any:
    """Read the results that an earlier run of the benchmark stored.

    Raises:
        OSError: there is no such file.
        ValueError: a different version of the benchmark wrote the file.
    """
    return TypeAdapter(page.run).validate_python(json.loads(results.read_text()))


def render(page: Page, run: BenchmarkRun, before: str = "", results: str = "") -> str:
    """Return the Markdown page.

    Args:
        page: the benchmark's page.
        run: the results.
        before: the current page, if `page` is a section of it.
        results: name of the JSON file to which the page links; empty: the name of `page.results`.
    """
    results = results or page.results.name
    picture = f"![{page.picture}]({Path(results).with_suffix('.svg')})" if page.draw(run) is not None else None
    common = {
        "written": f"Written by `{page.command}` in {run.seconds:.0f} s from [{results}]({results}).",
        "load": run.machine.load,
        "caveats": _caveats(run),
        "picture": picture,
        "tolerance": f"{FLOOR_TOLERANCE_RATIO:.0%}",
    }
    text = wrap(fill(page.template, {**common, **page.values(run)}))
    return with_section(before, page.command, text) if page.is_section else text


def fill(template: str, values: Mapping[str, str | None]) -> str:
    """Return a template with its placeholders replaced, by the rules in the docstring of this module."""
    kept: list[str] = []
    omitted_level = 0
    """Heading level of the section that is left out; 0 outside such a section."""
    for block in template.strip().split("\n\n"):
        level = len(block) - len(block.lstrip("#"))
        if level and (not omitted_level or level <= omitted_level):
            omitted_level = 0 if _is_complete(block, values) else level
        if not omitted_level:
            items = [_filled(item, values) for item in re.split(r"\n(?=- )", block) if _is_complete(item, values)]
            kept += ["\n".join(items)] if items else []
    return "\n\n".join(kept) + "\n"


def _is_complete(text: str, values: Mapping[str, str | None]) -> bool:
    return all(values[name] is not None for _, name, _ in PLACEHOLDER.findall(text))


def _filled(text: str, values: Mapping[str, str | None]) -> str:
    text = re.sub(r"\n *", " ", text)  # join the lines of the paragraph; `wrap` breaks them again at the text's width
    return PLACEHOLDER.sub(lambda match: "" if match[3] else f"{match[1]}{values[match[2]]}", text)


def with_section(document: str, command: str, section: str) -> str:
    """Return a document with one section replaced, or appended if it is missing.

    Args:
        document: Markdown; empty for a new document.
        command: the command that writes the section, such as `make bench-first`.
        section: new content.
    """
    begin, end = f"<!-- {command}: begin -->", f"<!-- {command}: end -->"
    whole = f"{begin}\n{section.strip()}\n{end}"
    if begin in document and end in document:
        return document[: document.index(begin)] + whole + document[document.index(end) + len(end) :]
    return f"{(document or TITLE).rstrip()}\n\n{whole}\n"


def _caveats(run: BenchmarkRun) -> str | None:
    busy = f"**No value counts, because {BUSY}. Run the benchmark again.**"
    return "\n\n".join([QUICK] * run.is_quick + [busy] * run.is_busy) or None
