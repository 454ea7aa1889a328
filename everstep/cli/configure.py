"""`everstep configure`: store endpoint and token for the command line, the SDK, plain boto3 and the AWS CLI."""

from __future__ import annotations

import configparser
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from everstep import aws_models, config
from everstep.cli.commands import Shown, command, connect
from everstep.config import ClientConfig, checked_endpoint

AWS_PROFILE = "everstep"

app = typer.Typer(add_completion=False)


@command(app)
def configure(
    endpoint_url: Annotated[str | None, typer.Option(help="URL of the service; prompted for if missing.")] = None,
    token: Annotated[
        str | None,
        typer.Option(help="Bearer token. Safer: omit it, and the command prompts for it or reads it from stdin."),
    ] = None,
    profile: Annotated[
        str, typer.Option(help="Name for this service if you use several; select it with --profile.")
    ] = config.DEFAULT_PROFILE,
    region: Annotated[
        str, typer.Option(help="Region of the AWS profile for AWS's own services; Everstep ignores it.")
    ] = "us-east-1",
    ca_bundle: Annotated[
        str | None,
        typer.Option(help="PEM file of a private certificate authority that signed the service's certificate."),
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Check that the service accepts the token.")] = True,
) -> Shown:
    """Connect the command line, the SDK, plain boto3 and the AWS CLI of this user to a service."""
    url = checked_endpoint(endpoint_url or _ask("Endpoint URL", hide=False))
    configuration = ClientConfig(url, (token or _ask("Token", hide=True)).strip(), ca_bundle)
    if check:
        with connect(endpoint_url=url, token=configuration.token, ca_bundle=ca_bundle) as service:
            service.list_fleets()
    path = config.write(configuration, profile=profile)
    others = config.profiles()
    models = aws_models.install(
        aws_models.default_directory(Path.home()), others.pop(config.DEFAULT_PROFILE, None), *others.values()
    )
    aws_profile = AWS_PROFILE if profile == config.DEFAULT_PROFILE else f"{AWS_PROFILE}-{profile}"
    missing_lines = _add_profile(
        Path.home() / ".aws" / "config",
        aws_profile,
        region,
        ca_bundle,
        None if profile == config.DEFAULT_PROFILE else url,
    )
    by_hand = (
        f"\nthe profile {aws_profile!r} is yours; change it by hand: it must say this, and no other "
        f"ca_bundle:\n{missing_lines}"
        if missing_lines
        else ""
    )
    named = "" if profile == config.DEFAULT_PROFILE else f" --profile {profile}"
    return Shown(
        {
            "Profile": profile,
            "EndpointUrl": url,
            "Path": str(path),
            "ModelDirectory": str(models[0].parent),
            "AwsProfile": aws_profile,
        },
        f"configured {url}",
        f"written: {path}, {models[0].parent}, the profile {aws_profile!r} in ~/.aws/config\nnow: everstep "
        f"jobs list{named}   "
        f"aws --profile {aws_profile} everstep list-training-jobs   AWS_PROFILE={aws_profile} python "
        f"your_boto3_script.py{by_hand}",
    )


def _ask(what: str, *, hide: bool) -> str:
    if not sys.stdin.isatty():
        line = sys.stdin.readline().strip()
        if not line:
            raise typer.BadParameter(f"No {what} was passed, and standard input contains none.")
        return line
    answer: str = typer.prompt(what, hide_input=hide, err=True)
    return answer


def _add_profile(path: Path, name: str, region: str, ca_bundle: str | None, endpoint_url: str | None) -> str:
    """Append an AWS profile to the AWS configuration file, unless a profile of that name exists.

    An existing profile belongs to the user. The function changes only its endpoint, and only if the endpoint has the
    form that this function writes. Return the lines that the user must add to an existing profile, or an empty text.
    `endpoint_url` is None for the default profile, whose endpoint the service model already contains.
    """
    text = path.read_text() if path.exists() else ""
    bundle = f"ca_bundle = {Path(ca_bundle).resolve()}\n" if ca_bundle else ""
    services = (
        f"services = {name}\n\n[services {name}]\n{aws_models.SERVICE} =\n  endpoint_url = {endpoint_url}\n"
        if endpoint_url
        else ""
    )
    if re.search(rf"^\[profile {re.escape(name)}\]", text, re.MULTILINE):
        if endpoint_url:
            written = re.compile(rf"(?<=\[services {re.escape(name)}\]\n{aws_models.SERVICE} =\n  endpoint_url = ).*")
            text = written.sub(lambda _: endpoint_url, text)
            path.write_text(text)
        meant = f"[profile {name}]\n{bundle}{services}"
        return (
            "" if _profile_settings(text, name, endpoint_url) == _profile_settings(meant, name, endpoint_url) else meant
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a") as file:
        gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
        file.write(f"{gap}[profile {name}]\nregion = {region}\n{bundle}{services}")
    return ""


def _profile_settings(text: str, name: str, endpoint_url: str | None) -> tuple[str | None, bool] | None:
    """Return the CA bundle of a profile in an AWS configuration file, and whether the profile sets `endpoint_url`.

    Return None if the file cannot be parsed. The function parses the file as the AWS clients do.
    """
    parsed = configparser.RawConfigParser()
    try:
        parsed.read_string(text)
    except configparser.Error:
        return None
    profile = parsed[f"profile {name}"]
    services = parsed.get(f"services {profile.get('services')}", aws_models.SERVICE, fallback="")
    return profile.get("ca_bundle"), endpoint_url in re.findall(r"^endpoint_url\s*=\s*(.*)", services, re.MULTILINE)
