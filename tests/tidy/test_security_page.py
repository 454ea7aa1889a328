"""Each sentence of docs/security.md that promises something names tests, and the table of promises has each of them.

A comment behind a paragraph, a bullet or a row names them, with one entry per sentence or per listed noun:

    <!-- tests: test_of_the_first_sentence; -; test_of_the_third, another_test_of_the_third -->

The entry `-` stands for a sentence that promises nothing: advice, a limit, or a fact of AWS.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests import selection

PROSE, _, TABLE = selection.SECURITY_PAGE.read_text().partition("## Promises")
NAMED = re.compile(r"\s*<!-- tests: (.*?)\s-->", re.DOTALL)
NO_PROMISE = re.compile(r"#|<!-- roles|\| (?:who|least role|---) |\| (?:none|viewer|submitter|admin) \| [A-Z]")


def blocks(prose: str) -> list[str]:
    """Return the paragraphs, the bullets and the table's rows that need a comment."""
    parts = (part.strip() for part in re.split(r"\n\n|\n(?=- |\| )", prose))
    return [part for part in parts if part and not NO_PROMISE.match(part)]


def statements(block: str) -> list[str]:
    """Return the sentences of a block without its comment, or the nouns in the last cell of a row."""
    text = " ".join(NAMED.sub("", block).split())
    if text.startswith("| "):
        return [noun for noun in re.split(r"[,;] ", text.split("|")[-2].strip()) if noun]
    return re.split(r"(?<=\.) (?=[A-Z`])", text)


def entries(block: str) -> list[list[str]]:
    """Return the names of the tests of each sentence. The entry `-` has none."""
    named = NAMED.search(block)
    return [re.findall(r"\w+", entry) for entry in named[1].split(";")] if named else []


@pytest.mark.parametrize("block", blocks(PROSE), ids=lambda block: block[:30])
def test_each_sentence_names_tests_of_the_table_or_promises_nothing(block: str) -> None:
    listed = {test.rpartition("::")[2] for test in selection.PROMISED}
    assert len(entries(block)) == len(statements(block)), statements(block)
    assert {name for names in entries(block) for name in names} <= listed


def test_each_row_of_the_table_names_an_existing_test() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(re.findall(r"^\| \S.*\. \| `.*` \|$", TABLE, re.MULTILINE)) > 90
    for test in selection.PROMISED:
        path, _, name = test.partition("::")
        tree = ast.parse((selection.ROOT.parent / path).read_text(encoding="utf-8"))
        assert name in {getattr(node, "name", "") for node in tree.body}, test


def test_a_sentence_without_an_entry_is_found() -> None:
    (block,) = blocks("# Title\n\n- **A.** It holds. It [lasts](x.md) 2.5 s.\n  <!-- tests: test_a, test_b; - -->\n")
    assert statements(block) == ["- **A.** It holds.", "It [lasts](x.md) 2.5 s."]
    assert entries(block) == [["test_a", "test_b"], []]
    assert statements("| node | its reports | other runs, nodes; all <!-- tests: - --> |") == [
        "other runs",
        "nodes",
        "all",
    ]
