"""`everstep configure`: the endpoint and the token, written down for the command line, the SDK, plain boto3 and the AWS CLI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from everstep import aws_models, config
from everstep.cli.output import say
from everstep.config import ClientConfig, checked_endpoint

PROFILE = "everstep"


def configure(
    endpoint_url: Annotated[str | None, typer.Option(help="URL of the service; asked for unless given.")] = None,
    token: Annotated[str | None, typer.Option(help="Bearer token; better left out: then it is asked for, or read from standard input.")] = None,
    region: Annotated[str, typer.Option(help="What the profile has for AWS's own services; Everstep needs none.")] = "us-east-1",
    ca_bundle: Annotated[str | None, typer.Option(help="PEM file with the authority of the service's certificate, where it is your own.")] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Whether to ask the service if it takes the token.")] = True,
) -> None:
    """Set up this user: the command line, the SDK, plain boto3 and the AWS CLI speak to one service from now on."""
    url = checked_endpoint(endpoint_url or _ask("Endpoint URL", hide=False))
    configuration = ClientConfig(url, (token or _ask("Token", hide=True)).strip(), ca_bundle)
    if check:
        from everstep import failures, sdk  # with botocore, which no --help needs

        with failures.translated():
            client = sdk.client(configuration.endpoint_url, configuration.token, ca_bundle=ca_bundle)
            client.list_fleets()
            client.close()
    path = config.write(configuration)
    models = aws_models.install(aws_models.default_directory(Path.home()), configuration)
    _add_profile(Path.home() / ".aws" / "config", region, ca_bundle)
    typer.echo(f"configured {url}")
    say(f"written: {path}, {models[0].parent}, the profile {PROFILE!r} in ~/.aws/config")
    say(f"now: everstep jobs list   aws --profile {PROFILE} everstep list-training-jobs   AWS_PROFILE={PROFILE} python your_boto3_script.py")


def _ask(what: str, *, hide: bool) -> str:
    if not sys.stdin.isatty():
        line = sys.stdin.readline().strip()
        if not line:
            raise typer.BadParameter(f"{what} is neither given nor on standard input.")
        return line
    answer: str = typer.prompt(what, hide_input=hide, err=True)
    return answer


def _add_profile(path: Path, region: str, ca_bundle: str | None) -> None:
    """Add the profile at the file's end; one that is there already is the user's and stays."""
    text = path.read_text() if path.exists() else ""
    if f"[profile {PROFILE}]" in text.splitlines():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a") as file:
        gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
        bundle = f"ca_bundle = {Path(ca_bundle).resolve()}\n" if ca_bundle else ""
        file.write(f"{gap}[profile {PROFILE}]\nregion = {region}\n{bundle}")
