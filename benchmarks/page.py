"""Renders the pages of all benchmarks: a Markdown page and a picture, from stored results and a template.

The template of a page is a file in `benchmarks/pages/`. A benchmark supplies a text or None for each placeholder:

    {name}   is replaced by the text
    {name?}  is removed; it only decides whether its paragraph or section is left out

Without a text, the placeholder's paragraph, table or list item is left out; in a heading, the whole section.
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
    """The results that all runs have in common. Subclasses add the measured values."""

    machine: Machine
    is_quick: bool
    seconds: float

    @property
    def is_busy(self) -> bool:
        """Busy at the start, so that all values are inconclusive."""
        return is_busy(self.machine.load_average[0], self.machine.cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One benchmark's page in `docs/`."""

    name: str
    """Name of the template, and part of the names of results and page."""
    command: str
    """Such as `make bench-api`."""
    run: type[Any]
    """A subclass of `BenchmarkRun`."""
    values: Callable[[Any], Mapping[str, str | None]]
    """Texts by placeholder of the template."""
    rows: Callable[[Any], Sequence[Row]] = lambda _: ()
    """Their verdicts determine the exit code."""
    draw: Callable[[Any], str | None] = lambda _: None
    """Returns the SVG document, or None."""
    picture: str = ""
    """Alternative text of the picture."""
    is_section: bool = False
    """A section of `docs/benchmarks.md`."""

    @property
    def results(self) -> Path:
        """JSON in `docs/`."""
        return DOCS / f"benchmarks-{self.name}.json"

    @property
    def document(self) -> Path:
        """Markdown file that contains the page."""
        return DOCS / ("benchmarks.md" if self.is_section else f"benchmarks-{self.name}.md")

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.md").read_text()


def write(page: Page, run: BenchmarkRun, results: Path, document: Path) -> None:
    """Write the results, the page and its picture beside the results. Other sections of `document` do not change."""
    for path in (results, document):
        path.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(dataclasses.asdict(run), indent=1) + "\n")
    render_again(page, results, document)


def render_again(page: Page, results: Path, document: Path) -> None:
    """Write the page and its picture from stored results."""
    before = document.read_text() if document.exists() else ""
    run = load(page, results)
    document.write_text(render(page, run, before, results.name))
    picture = page.draw(run)
    if picture is not None:
        document.with_name(results.with_suffix(".svg").name).write_text(picture)


def load(page: Page, results: Path) -> Any:
    """Read stored results. Raises OSError without the file, and ValueError if another version wrote it."""
    return TypeAdapter(page.run).validate_python(json.loads(results.read_text()))


def render(page: Page, run: BenchmarkRun, before: str = "", results: str = "") -> str:
    """Return the Markdown page.

    `before` is the current document of a section. `results` is the linked JSON file; empty: the name of `page.results`.
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
    """Return a template with its placeholders replaced."""
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
    """Return a Markdown document with the section of `command` replaced, or appended if it is missing."""
    begin, end = f"<!-- {command}: begin -->", f"<!-- {command}: end -->"
    whole = f"{begin}\n{section.strip()}\n{end}"
    if begin in document and end in document:
        return document[: document.index(begin)] + whole + document[document.index(end) + len(end) :]
    return f"{(document or TITLE).rstrip()}\n\n{whole}\n"


def _caveats(run: BenchmarkRun) -> str | None:
    busy = f"**No value counts, because {BUSY}. Run the benchmark again.**"
    return "\n\n".join([QUICK] * run.is_quick + [busy] * run.is_busy) or None
