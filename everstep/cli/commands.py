"""What all commands have in common: their options, their client, and how what they answer is shown.

    @command(app, "list")
    def list_quotas(service: Service, pages: Pages) -> Shown:
        answer = pages.of(service, "list_project_quotas")
        return Shown(answer, Rows(answer["Quotas"], {"PROJECT": "Project"}, empty="No project has a quota."))

A command says what the service answered and what a person should see of it. `--output` and `--query` come with every
command; one that asks for `service` has the options that say which, one that asks for `pages` those of a list. One that
does what cannot be undone says what to ask first:

    @command(app, asks=lambda given: f"Revoke the token {given['token_id']}, for good?")

Invariant: with `--output json` and no `--query`, stdout is the service's answer and nothing else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from everstep.cli.confirm import confirmed
from everstep.cli.formats import OutputFormat, headings_and_cells, plain, rendered
from everstep.cli.output import FAILED, Facts, Json, Part, Rows, echo, leave_stdout, say, show, show_cells
from everstep.cli.tables import Columns, Detail, Prose
from everstep.errors import ConfigurationError, FileFailed

__all__ = [
    "Asks",
    "Columns",
    "Detail",
    "Facts",
    "Json",
    "Output",
    "OutputFormat",
    "Pages",
    "Prose",
    "Query",
    "Rows",
    "Service",
    "Shown",
    "command",
]

if TYPE_CHECKING:
    from everstep.service import EverstepClient as Service
else:

    class Service:
        """The client, connected as the options say. Commands ask for it by the name `service`."""


LARGEST_PAGE: Final = 1_000
"""Items that the service gives in one answer at the most."""
MAX_ITEMS: Final = 1_000
"""Items of a list that programs get unless they ask for more."""
TABLE_ITEMS: Final = 100
"""Items that people see unless they ask for more: some screens, within half a second."""

_EVERYWHERE = "Options of every command"
_LISTS = "Options of lists"

Output = Annotated[
    OutputFormat,
    typer.Option(
        "--output",
        "-o",
        help="table for people; json, yaml, text for programs: the service's own answer.",
        rich_help_panel=_EVERYWHERE,
    ),
]
Query = Annotated[
    str | None, typer.Option("--query", help="JMESPath: what of the answer is shown.", rich_help_panel=_EVERYWHERE)
]

_SHOWING: Final = {"output": (Output, OutputFormat.TABLE), "query": (Query, None)}
_CONNECTION: Final = {
    "profile": (
        Annotated[
            str | None,
            typer.Option(help="Which of the services that everstep configure wrote down.", rich_help_panel=_EVERYWHERE),
        ],
        None,
    ),
    "endpoint_url": (
        Annotated[
            str | None,
            typer.Option(
                help="URL of the service, instead of the one that is configured.", rich_help_panel=_EVERYWHERE
            ),
        ],
        None,
    ),
    "region": (
        Annotated[
            str | None,
            typer.Option(
                help="Region that the client says it is for; Everstep itself has none.", rich_help_panel=_EVERYWHERE
            ),
        ],
        None,
    ),
    "debug": (
        Annotated[
            bool,
            typer.Option(
                "--debug",
                help="Every exchange with the service, its retries and request ids, to stderr; no secrets.",
                rich_help_panel=_EVERYWHERE,
            ),
        ],
        False,
    ),
}
_ASKING: Final = {
    "yes": (
        Annotated[
            bool, typer.Option("--yes", "-y", help="Do it without asking first; needed where there is no terminal.")
        ],
        False,
    )
}
_PAGING: Final = {
    "max_items": (
        Annotated[
            int | None,
            typer.Option(
                min=1,
                help=f"At most this many; unless said {TABLE_ITEMS} in a table, {MAX_ITEMS:,} else.",
                rich_help_panel=_LISTS,
            ),
        ],
        None,
    ),
    "page_size": (
        Annotated[
            int,
            typer.Option(
                min=1, max=LARGEST_PAGE, help="At most this many in one call of the service.", rich_help_panel=_LISTS
            ),
        ],
        LARGEST_PAGE,
    ),
    "starting_token": (
        Annotated[
            str | None, typer.Option(help="NextToken of a list that ended early: go on there.", rich_help_panel=_LISTS)
        ],
        None,
    ),
    "paginate": (
        Annotated[
            bool,
            typer.Option("--paginate/--no-paginate", help="Ask for all pages, or for one.", rich_help_panel=_LISTS),
        ],
        True,
    ),
}

_Command = TypeVar("_Command", bound=Callable[..., Any])
Asks = Callable[[Mapping[str, Any]], str | None]
"""What to ask before a command does its work, by its arguments; None: nothing."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a command has to show."""

    body: Json
    """What the service answered: for programs, and for `--query`."""
    person: Part | tuple[Part, ...]
    """What a person sees of it on stdout."""
    note: str = ""
    """What a person should know besides, or do next; to stderr."""
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Pages:
    """How much of a list is fetched, and how. Commands ask for it by the name `pages`."""

    max_items: int | None = None
    """None: `default_items`, and as many as come where somebody follows."""
    default_items: int = MAX_ITEMS
    page_size: int = LARGEST_PAGE
    starting_token: str | None = None
    paginate: bool = True

    def of(self, service: Any, operation: str, **query: Any) -> dict[str, Any]:
        """Return a list.

        Args:
            service: the client.
            operation: one that has pages.
            **query: the operation's arguments, those of pages excepted; what is None is left out.

        Returns:
            The operation's answer, over all its pages; with `NextToken` where more is there.
        """
        asked = {name: value for name, value in query.items() if value is not None}
        most = self.default_items if self.max_items is None else self.max_items
        if not self.paginate:
            first = {} if self.starting_token is None else {"NextToken": self.starting_token}
            answer: dict[str, Any] = getattr(service, operation)(**asked, MaxResults=min(most, self.page_size), **first)
            return answer
        settings = {"MaxItems": most, "PageSize": min(most, self.page_size), "StartingToken": self.starting_token}
        whole: dict[str, Any] = (
            service.get_paginator(operation).paginate(**asked, PaginationConfig=settings).build_full_result()
        )
        return whole


def command(app: typer.Typer, name: str | None = None, *, asks: Asks | None = None) -> Callable[[_Command], _Command]:
    """Return a decorator that adds a command, with the options that all have.

    Args:
        app: the noun that it belongs to.
        name: of the command; by default the function's.
        asks: for what cannot be undone; whoever says no ends the command with exit code 1.

    Returns:
        The decorator; the function itself stays as it is.
    """

    def add(function: _Command) -> _Command:
        app.command(name)(_with_options(function, asks))
        return function

    return add


@contextmanager
def connect(**options: Any) -> Iterator[Service]:
    """Give a client; what it raises can be told.

    Args:
        **options: of `everstep.sdk.client`.

    Yields:
        The client.
    """
    from everstep import failures, sdk  # with botocore, which no --help needs

    service = sdk.client(**options)
    try:
        with failures.translated():
            yield service
    finally:
        service.close()


@contextmanager
def _exchanges_on_stderr() -> Iterator[None]:
    import logging  # no --help needs them

    from everstep import exchanges

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S"))
    before = exchanges.log.level
    exchanges.log.addHandler(handler)
    exchanges.log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        exchanges.log.setLevel(before)
        exchanges.log.removeHandler(handler)


def searched(body: Json, query: str | None) -> Any:
    """Return what a query finds in an answer.

    Args:
        body: what the service answered.
        query: JMESPath, or None: everything.

    Returns:
        As `plain` gives it.

    Raises:
        ConfigurationError: the query is not JMESPath, or does not fit what is there.
    """
    value = plain(body)
    if query is None:
        return value
    with _refusing(query):
        return _compiled(query).search(value)


def _compiled(query: str) -> Any:
    import jmespath  # no --help needs it

    return jmespath.compile(query)


@contextmanager
def _refusing(query: str) -> Iterator[None]:
    from jmespath.exceptions import JMESPathError  # no --help needs it

    try:
        yield
    except JMESPathError as error:
        raise ConfigurationError(
            f"--query {query!r}: {' '.join(str(error).split())}", hint="See https://jmespath.org"
        ) from error


def present(shown: Shown, output: OutputFormat, query: str | None) -> None:
    """Show what a command has answered, as its options say."""
    if output is OutputFormat.TABLE and query is None:
        show(shown.person)
        if "NextToken" in shown.body:
            say(f"There are more: --max-items, or --starting-token {shown.body['NextToken']}")
        if shown.note:
            say(shown.note)
        return
    show_value(searched(shown.body, query), output)


def show_value(value: Any, output: OutputFormat, *, is_one_of_many: bool = False) -> None:
    """Print a value that a query has found, or a whole answer for a program, to stdout."""
    if output is OutputFormat.TABLE:
        show_cells(*headings_and_cells(value))
    elif text := rendered(value, output, is_one_of_many=is_one_of_many):
        echo(text)


def _with_options(function: Callable[..., Any], asks: Asks | None) -> Callable[..., None]:
    own = inspect.signature(function, eval_str=True).parameters
    asked: Mapping[str, tuple[object, object]] = {
        **({} if asks is None else _ASKING),
        **({} if "pages" not in own else _PAGING),
        **_SHOWING,
        **({} if "service" not in own else _CONNECTION),
    }
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in asked.items()
        if name not in own
    ]
    parameters = [parameter for name, parameter in own.items() if name not in ("service", "pages")] + added

    @functools.wraps(function)
    def run(**given: Any) -> None:
        try:
            obey(given)
        except BrokenPipeError:  # `| head` is no failure of ours; click would call it one
            leave_stdout()
            raise typer.Exit(0) from None
        except OSError as error:
            named = "" if error.filename is None else f"{error.filename}: "
            raise FileFailed(
                f"{named}{error.strerror or error}.", hint="Check the path, its permissions and the free space."
            ) from error

    def obey(given: dict[str, Any]) -> None:
        options = {parameter.name: given.pop(parameter.name) for parameter in added}
        said = {**options, **given}
        output, query = said["output"], said["query"]
        if query is not None:
            with _refusing(query):
                _compiled(query)  # what is wrong with it is said before the service is asked for anything
        with ExitStack() as stack:
            if "pages" in own:
                given["pages"] = Pages(
                    **{name: options[name] for name in _PAGING},
                    default_items=TABLE_ITEMS if output is OutputFormat.TABLE else MAX_ITEMS,
                )
            if "service" in own:
                if options["debug"]:
                    stack.enter_context(_exchanges_on_stderr())
                given["service"] = stack.enter_context(
                    connect(
                        endpoint_url=options["endpoint_url"],
                        profile_name=options["profile"],
                        region_name=options["region"],
                    )
                )
            question = None if asks is None else asks(said)
            if question is not None and not confirmed(question, yes=options["yes"]):
                raise typer.Exit(FAILED)
            shown: Shown | None = function(**given)
        if shown is not None:
            present(shown, output, query)
            if shown.exit_code:
                raise typer.Exit(shown.exit_code)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
