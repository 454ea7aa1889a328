"""The command line of the local cloud: `python -P -m infra.local_cloud`, started by `everstep local`.

The exit code is 0 after success. It is 1 after an operating error, which is printed as one line. `status` exits with 3
if the cloud is not completely up.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from everstep.host.local_keys import LocalKeys, UnusableKeys
from infra.local_cloud import fault_commands
from infra.local_cloud.environment import POISONOUS, aws_variables
from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.faults import Conditions
from infra.local_cloud.parts import write_private
from infra.local_cloud.processes import exit_when_asked

app = typer.Typer(
    name="everstep local",
    help="A complete Everstep on this machine, without an AWS account or a GPU.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(fault_commands.app, name="fault")
console = Console(stderr=True, highlight=False)


class Network(StrEnum):
    """The network of the instances: loopback, or a network namespace per instance."""

    LOOPBACK = "loopback"
    NAMESPACES = "namespaces"


StateDir = Annotated[Path, typer.Option(envvar="EVERSTEP_STATE_DIR", help="State directory of the local cloud.")]
DEFAULT_STATE_DIR = Path(".everstep")
NO_KEYS = LocalKeys(access_key_id="", secret_access_key="")
"""Placeholder for a call whose result only provides names of variables."""
MAX_WIDTH = 240
"""Columns of a table in a file or a pipe, so that no cell is cut."""


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=48, help="Number of nodes for jobs.")] = 4,
    spares: Annotated[int, typer.Option(min=0, max=16, help="Number of spare nodes.")] = 1,
    max_nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Limit up to which the fleet may grow; by default nodes and spares."),
    ] = None,
    boot_delay: Annotated[
        float, typer.Option(min=0, max=600, help="Seconds from an instance's launch until it runs.")
    ] = 0.5,
    node_memory_mib: Annotated[
        int | None,
        typer.Option(min=1, help="Memory for snapshots on each node; by default a share of the free memory."),
    ] = None,
    detection_seconds: Annotated[
        float | None, typer.Option(min=0.2, help="Time until a silent node is detected; all timeouts derive from it.")
    ] = None,
    network: Annotated[
        Network, typer.Option(help="namespaces: one per node, so that faults can cut and slow links (needs root).")
    ] = Network.LOOPBACK,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of all randomness in the local AWS; by default random.")
    ] = None,
    aws_answers: Annotated[
        Path | None, typer.Option(help="File of `everstep aws-conformance`; by default the stored answers.")
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Start a local AWS, a control plane and a fleet, and wait until its nodes have connected."""
    from infra.local_cloud.up import ClusterOptions, LocalCluster

    exit_when_asked(with_parent=False)
    began = time.monotonic()
    cluster = LocalCluster(state_dir, progress=_Printed())
    cluster.up(
        ClusterOptions(
            nodes=nodes,
            spares=spares,
            max_nodes=max_nodes,
            conditions=Conditions(boot_delay_seconds=boot_delay, api_rate_share=1.0),
            node_memory_bytes=node_memory_mib and node_memory_mib * 1024**2,
            detection_seconds=detection_seconds,
            has_namespaces=network is Network.NAMESPACES,
            seed=seed,
            aws_answers=aws_answers,
        )
    )
    took = time.monotonic() - began
    console.print(
        f"[bold]up[/bold] in {took:.1f} s: control plane {cluster.endpoint_url}, AWS {cluster.aws_url}, "
        f"seed {cluster.seed}"
    )
    limits = cluster.limits()
    console.print(
        f"at most {limits.max_nodes} nodes, each with {limits.node_memory_bytes >> 20} MiB for snapshots "
        "(--max-nodes, --node-memory-mib)"
    )
    console.print('point this shell at it:  [bold]eval "$(everstep local env)"[/bold]')


@app.command()
def down(state_dir: StateDir = DEFAULT_STATE_DIR) -> None:
    """Stop all processes of the local cloud. Logs are kept. Safe to repeat, also after a crash."""
    from infra.local_cloud.up import LocalCluster

    LocalCluster(state_dir).down()
    console.print("down")


@app.command()
def status(
    state_dir: StateDir = DEFAULT_STATE_DIR,
    output: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Show the running processes of the local cloud."""
    from infra.local_cloud.up import LocalCluster

    cluster = LocalCluster(state_dir)
    parts = cluster.status()
    is_up = len(parts) == 2 and all(part.is_alive for part in parts)
    instances = cluster.instances() if any(part.is_alive and part.name == "aws" for part in parts) else {}
    if output == "json":
        rows = [
            {"Name": part.name, "Pid": part.pid, "Alive": part.is_alive, "Url": part.url, "Log": part.log}
            for part in parts
        ]
        uses = {"MemoryBytes": cluster.memory_bytes()} if is_up else {}
        print(json.dumps({"Up": is_up, "Parts": rows, "Instances": instances, **uses}, indent=1))
    elif not parts:
        console.print(f"nothing is up in {cluster.state_dir}")
    else:
        table = Table("what", "pid", "state", "where", box=None)
        for part in parts:
            table.add_row(
                part.name, str(part.pid), "runs" if part.is_alive else "[red]dead[/red]", f"{part.url}  {part.log}"
            )
        for instance_id, pid in instances.items():
            table.add_row(instance_id, str(pid), "runs", str(cluster.nodes_directory / instance_id / "console.log"))
        shown = Console(highlight=False, width=None if sys.stdout.isatty() else MAX_WIDTH)
        shown.print(table)
        if is_up:
            nodes = f"{len(instances)} of at most {cluster.limits().max_nodes} nodes"
            shown.print(f"{nodes}, {cluster.memory_bytes() >> 20} MiB of memory in use")
    if not is_up:
        raise typer.Exit(3)


@app.command()
def env(
    unset: Annotated[bool, typer.Option("--unset", help="Print the lines that revert the variables.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Print shell lines that direct Everstep and AWS tools to the local cloud: eval "$(everstep local env)"."""
    from infra.local_cloud.up import LocalCluster

    if unset:
        names = ["EVERSTEP_ENDPOINT_URL", "EVERSTEP_TOKEN", "AWS_DATA_PATH", "AWS_ENDPOINT_URL_EVERSTEP"]
        print(" ".join(["unset", *names, *aws_variables("http://127.0.0.1", NO_KEYS)]))
        return
    variables = LocalCluster(state_dir).environment()
    print(f"unset {' '.join(POISONOUS)}")
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")


@app.command(hidden=True)
def serve(options: Annotated[str, typer.Argument(help="AwsOptions as JSON.")]) -> None:
    """Serve the local AWS until SIGTERM. `up` starts this command."""
    from infra.local_cloud.aws import LocalAws
    from infra.local_cloud.aws_options import AWS_OPTIONS

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    os.umask(0o077)  # The processes of the instances inherit this umask: only this user can read their files.
    given = AWS_OPTIONS.decode(options)
    cloud = LocalAws(given)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: cloud.stop())
    cloud.start()
    ready = {
        "url": cloud.url,
        "pid": str(os.getpid()),
        "seed": str(given.seed),
        "control_planes": " ".join(f"{address}:{port}" for address, port in cloud.control_planes),
        "balancer": "{}:{}".format(*cloud.balancer),
        "storage": "{}:{}".format(*cloud.storage),
    }
    write_private(Path(given.ready_file), json.dumps(ready).encode())
    cloud.run()
    logging.shutdown()
    os._exit(0)  # Exit without the interpreter's teardown, which needs seconds to free moto's objects.


class _Printed:
    """Shows the progress of `up` on the terminal: a spinner during each step, and a line after it."""

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        began = time.monotonic()
        with console.status(f"{title} …"):
            yield
        console.print(f"[green]✓[/green] {title} [dim]({time.monotonic() - began:.1f} s)[/dim]")


def main() -> None:
    """Run the command line. A `LocalCloudError` or `UnusableKeys` prints one line on stderr, with exit code 1."""
    try:
        app(prog_name="everstep local")
    except (LocalCloudError, UnusableKeys) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
