"""Provides what all commands share: common options, the client, and the display of results.

    @command(app, "list")
    def list_quotas(service: Service, pages: Pages) -> Shown:
        answer = pages.of(service, "list_project_quotas")
        return Shown(answer, Rows(answer["Quotas"], {"PROJECT": "Project"}, empty="No project has a quota."))

A command returns the service's answer and the part of the answer to show to people. The decorator adds options to the
command:

- Every command has `--output` and `--query`.
- A command with a parameter `service` has the options that select the service.
- A command with a parameter `pages` has the options that set a list's page size and maximum number of items.

A command that cannot be undone passes a function `asks` to the decorator. The function returns the question that the
user must confirm:

    @command(app, asks=lambda given: f"Revoke the token {given['token_id']}, for good?")

Invariant: with `--output json` and no `--query`, stdout is the service's answer and nothing else.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from typer.core import TyperCommand

from everstep.cli.confirm import confirmed
from everstep.cli.formats import OutputFormat, headings_and_cells, plain, rendered
from everstep.cli.output import FAILED, Json, Part, echo, leave_stdout, say, show, show_cells
from everstep.cli.request_options import FieldsOf
from everstep.errors import ConfigurationError, FileFailed

if TYPE_CHECKING:
    from everstep.service import EverstepClient  # pyright: ignore[reportMissingModuleSource]  only a stub

    Service = EverstepClient
else:

    class Service:
        """The client of the service that the command's options select.

        A command declares a parameter of this type, named `service`, to receive it.
        """


LARGEST_PAGE: Final = 1_000
"""Maximum number of items that the service returns in one answer."""
MAX_ITEMS: Final = 1_000
"""Default maximum number of items of a list in the formats `json`, `yaml` and `text`."""
TABLE_ITEMS: Final = 100
"""Default maximum number of items of a list in a table.

The table fills a few screens, and its items are fetched within half a second.
"""

_PROVIDED: Final = ("service", "pages")
_EVERYWHERE = "Options of every command"
_LISTS = "Options of lists"


def _option(
    kind: object, default: object, help: str, *names: str, panel: str | None = _EVERYWHERE, **limits: Any
) -> tuple[object, object]:
    """Return the annotation and the default of an option that the decorator adds to commands."""
    return Annotated[kind, typer.Option(*names, help=help, rich_help_panel=panel, **limits)], default


Output = Annotated[
    OutputFormat,
    typer.Option(
        "--output",
        "-o",
        help="table for people; json, yaml or text print the service's answer for programs.",
        rich_help_panel=_EVERYWHERE,
    ),
]
Query = Annotated[
    str | None,
    typer.Option(
        "--query", help="JMESPath expression that selects the part of the answer to print.", rich_help_panel=_EVERYWHERE
    ),
]

_SHOWING: Final = {"output": (Output, OutputFormat.TABLE), "query": (Query, None)}
_CONNECTION: Final = {
    "profile": _option(str | None, None, "Name of a service stored by everstep configure."),
    "endpoint_url": _option(str | None, None, "URL of the service; overrides the configured URL."),
    "region": _option(str | None, None, "AWS region for the client; Everstep itself ignores it."),
    "debug": _option(
        bool, False, "Log requests, answers, retries and request ids to stderr, without secrets.", "--debug"
    ),
}
_ASKING: Final = {
    "yes": _option(bool, False, "Skip the confirmation; required without a terminal.", "--yes", "-y", panel=None)
}
_PAGING: Final = {
    "max_items": _option(
        int | None,
        None,
        f"Maximum number of items; by default {TABLE_ITEMS} in a table, else {MAX_ITEMS:,}.",
        panel=_LISTS,
        min=1,
    ),
    "page_size": _option(
        int, LARGEST_PAGE, "Maximum number of items per request.", panel=_LISTS, min=1, max=LARGEST_PAGE
    ),
    "starting_token": _option(str | None, None, "Continue a list that ended early: its NextToken.", panel=_LISTS),
    "paginate": _option(bool, True, "Fetch all pages, or only one page.", "--paginate/--no-paginate", panel=_LISTS),
}

_Command = TypeVar("_Command", bound=Callable[..., Any])
Asks = Callable[[Mapping[str, Any]], str | None]
"""Function that receives a command's arguments and returns the text that the user must confirm.

It returns None if no confirmation is needed.
"""


@dataclass(frozen=True, slots=True)
class Shown:
    """The result of a command, which the command line prints for a program (`body`) or for people (`person`)."""

    body: Json
    """The service's answer, for `--query` and for the formats `json`, `yaml` and `text`."""
    person: Part | tuple[Part, ...]
    """The output for people.

    The decorator prints it to stdout if `--output` is `table` and the user passes no `--query`.
    """
    note: str = ""
    """A remark, or the next command to run. Printed to stderr together with `person`."""
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Pages:
    """Page size and item limit of a list. A command declares a parameter `pages` to receive it."""

    max_items: int | None = None
    """Maximum number of items.

    None means at most `default_items` for a list, and no limit while following events.
    """
    default_items: int = MAX_ITEMS
    page_size: int = LARGEST_PAGE
    starting_token: str | None = None
    paginate: bool = True

    def of(self, service: Any, operation: str, **query: Any) -> dict[str, Any]:
        """Call a list operation and return its answer, merged over all fetched pages.

        Args:
            service: botocore client of this service.
            operation: client method that supports pagination, for example `list_training_jobs`.
            **query: arguments of the operation, except the arguments for pagination. None leaves an argument out.

        Returns:
            The operation's answer, with `NextToken` if the list has more items.
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


class _PlainHelp(TyperCommand):
    """A command whose help names each option whole. typer's own table cuts names and squeezes texts at 80 columns."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help as click does."""
        super(TyperCommand, self).format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in groups (`rich_help_panel`), in the order in which the command declares them."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def command(app: typer.Typer, name: str | None = None, *, asks: Asks | None = None) -> Callable[[_Command], _Command]:
    """Return a decorator that adds a function as a command, together with the common options.

    Args:
        app: the typer group, such as `everstep jobs`, to which the decorator adds the command.
        name: the command's name. None: the function's name.
        asks: builds the confirmation question of a command that cannot be undone. If the user declines, the command
            ends with exit code 1.

    Returns:
        The decorator. It returns the function unchanged.
    """

    def add(function: _Command) -> _Command:
        app.command(name, cls=_PlainHelp)(_with_options(function, asks))
        return function

    return add


@contextmanager
def connect(**options: Any) -> Generator[Service]:
    """Provide a client that is closed at the end of the `with` block.

    Errors of the client leave the block as `EverstepError`s, which `main` prints.

    Args:
        **options: arguments of `everstep.sdk.client`.

    Yields:
        The client.
    """
    from everstep import failures, sdk  # Import here, because `--help` needs no botocore, whose import is slow.

    service = sdk.client(**options)
    try:
        with failures.translated():
            yield service
    finally:
        service.close()


@contextmanager
def _exchanges_on_stderr() -> Generator[None]:
    import logging  # Import here to keep `--help` fast.

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
    """Return the result of a JMESPath query over an answer.

    Args:
        body: the service's answer, as the client returns it.
        query: JMESPath; None returns the whole answer.

    Returns:
        Plain JSON values, as `plain` returns them.

    Raises:
        ConfigurationError: the query is not valid JMESPath or does not fit the answer.
    """
    value = plain(body)
    if query is None:
        return value
    with _refusing(query):
        return _compiled(query).search(value)


def _compiled(query: str) -> Any:
    import jmespath  # Import here to keep `--help` fast.

    return jmespath.compile(query)


@contextmanager
def _refusing(query: str) -> Generator[None]:
    from jmespath.exceptions import JMESPathError  # Import here to keep `--help` fast.

    try:
        yield
    except JMESPathError as error:
        raise ConfigurationError(
            f"--query {query!r}: {' '.join(str(error).split())}", hint="See https://jmespath.org"
        ) from error


def present(shown: Shown, output: OutputFormat, query: str | None) -> None:
    """Print the result of a command in the format that `--output` and `--query` select."""
    if output is OutputFormat.TABLE and query is None:
        show(shown.person)
        if "NextToken" in shown.body:
            say(f"There are more: --max-items, or --starting-token {shown.body['NextToken']}")
        if shown.note:
            say(shown.note)
        return
    show_value(searched(shown.body, query), output)


def show_value(value: Any, output: OutputFormat, *, is_one_of_many: bool = False) -> None:
    """Print a value from the service's answer to stdout.

    Args:
        value: the whole answer, or the part of it that `--query` selects.
        output: the format of the text. `table` prints the value as a table.
        is_one_of_many: True if the command prints several values, each as one document.
    """
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
    fields_of: FieldsOf | None = own["fields"].annotation.__metadata__[0] if "fields" in own else None
    setting = fields_of.parameters() if fields_of is not None else []
    places = [setting if name == "fields" else [parameter] for name, parameter in own.items() if name not in _PROVIDED]
    parameters = [*itertools.chain(*places), *added]

    @functools.wraps(function)
    def run(**given: Any) -> None:
        try:
            obey(given)
        except BrokenPipeError:
            # The program that reads stdout, such as `head`, has closed the pipe. click would report this as a failure.
            leave_stdout()
            raise typer.Exit(0) from None
        except OSError as error:
            named = "" if error.filename is None else f"{error.filename}: "
            raise FileFailed(
                f"{named}{error.strerror or error}.", hint="Check the path, its permissions and the free space."
            ) from error

    def obey(given: dict[str, Any]) -> None:
        options = {parameter.name: given.pop(parameter.name) for parameter in added}
        arguments = {**options, **given}
        output, query = arguments["output"], arguments["query"]
        if query is not None:
            with _refusing(query):
                _compiled(query)  # Reject an invalid query before calling the service.
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
            if fields_of is not None:
                given["fields"] = fields_of.request(
                    {parameter.name: given.pop(parameter.name) for parameter in setting}
                )
            question = None if asks is None else asks(arguments)
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
