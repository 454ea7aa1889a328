"""The command line of the local cloud: `python -P -m infra.local_cloud`, which `everstep local` runs.

Exit codes: 0 done, 1 it could not be done (one line says why), 3 `status` of a cloud that is not wholly up.
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

from everstep.protocol.local_keys import LocalKeys, UnusableKeys
from infra.local_cloud import fault_commands
from infra.local_cloud.environment import POISONOUS, aws_variables, process_environment
from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.faults import CONDITIONS, Conditions
from infra.local_cloud.parts import write_private

app = typer.Typer(
    name="everstep local",
    help="A whole Everstep on this machine: no AWS account, no GPU.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(fault_commands.app, name="fault")
console = Console(stderr=True, highlight=False)


class Network(StrEnum):
    """What instances are connected by."""

    LOOPBACK = "loopback"
    NAMESPACES = "namespaces"


StateDir = Annotated[
    Path, typer.Option(envvar="EVERSTEP_STATE_DIR", help="Where everything of this local cloud is kept.")
]
DEFAULT_STATE_DIR = Path(".everstep")
NO_KEYS = LocalKeys(access_key_id="", secret_access_key="")
"""For the names of variables, where their values do not matter."""
MAX_WIDTH = 240
"""Of a table that no terminal shows: nothing is cut off in a file or a pipe."""


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=48, help="Nodes that jobs can use.")] = 4,
    spares: Annotated[int, typer.Option(min=0, max=16, help="Nodes that wait for another one to fail.")] = 1,
    boot_delay: Annotated[
        float, typer.Option(min=0, max=600, help="Seconds from an instance's launch until it runs.")
    ] = 0.5,
    node_memory_mib: Annotated[
        int | None, typer.Option(min=1, help="Memory for snapshots on each node; a share of what is there unless said.")
    ] = None,
    detection_seconds: Annotated[
        float | None, typer.Option(min=0.2, help="How fast silence is noticed; all timeouts derive from it.")
    ] = None,
    network: Annotated[
        Network, typer.Option(help="namespaces: each node has one, so that lines can be cut and slowed (needs root).")
    ] = Network.LOOPBACK,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of all chance in the local AWS; a fresh one unless said.")
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Start a local AWS, a control plane and a fleet, and wait until its nodes have connected."""
    from infra.local_cloud.up import ClusterOptions, LocalCluster

    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # like an interrupt: what was started is ended
    began = time.monotonic()
    cluster = LocalCluster(state_dir, progress=_Printed())
    cluster.up(
        ClusterOptions(
            nodes=nodes,
            spares=spares,
            conditions=Conditions(boot_delay_seconds=boot_delay),
            node_memory_bytes=node_memory_mib and node_memory_mib * 1024**2,
            detection_seconds=detection_seconds,
            has_namespaces=network is Network.NAMESPACES,
            seed=seed,
        )
    )
    took = time.monotonic() - began
    console.print(
        f"[bold]up[/bold] in {took:.1f} s: control plane {cluster.endpoint_url}, AWS {cluster.aws_url}, "
        f"seed {cluster.seed}"
    )
    console.print('point this shell at it:  [bold]eval "$(everstep local env)"[/bold]')


@app.command()
def down(state_dir: StateDir = DEFAULT_STATE_DIR) -> None:
    """End everything of the local cloud; logs stay. Safe to repeat, also after a crash."""
    from infra.local_cloud.up import LocalCluster

    LocalCluster(state_dir).down()
    console.print("down")


@app.command()
def status(
    state_dir: StateDir = DEFAULT_STATE_DIR,
    output: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Show what runs."""
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
        print(json.dumps({"Up": is_up, "Parts": rows, "Instances": instances}, indent=1))
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
        Console(highlight=False, width=None if sys.stdout.isatty() else MAX_WIDTH).print(table)
    if not is_up:
        raise typer.Exit(3)


@app.command()
def env(
    unset: Annotated[bool, typer.Option("--unset", help="Print the lines that undo it.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Print shell lines that point the command line, the SDK and any AWS tool at the local cloud: eval "$(everstep local env)"."""
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
def serve(
    nodes_directory: Annotated[Path, typer.Option()],
    ready_file: Annotated[Path, typer.Option()],
    keys_file: Annotated[Path, typer.Option()],
    port: Annotated[int, typer.Option()] = 0,
    conditions: Annotated[str, typer.Option()] = "{}",
    instance_environment: Annotated[str, typer.Option()] = "{}",
    seed: Annotated[int, typer.Option()] = 0,
    network_name: Annotated[str, typer.Option()] = "",
) -> None:
    """Serve the local AWS until SIGTERM; `up` starts this."""
    from infra.local_cloud.aws import AwsOptions, LocalAws

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    os.umask(0o077)  # instances inherit it: their files are this user's alone
    marker = os.environ.get("EVERSTEP_LOCAL_CLUSTER", str(nodes_directory))
    keys = LocalKeys.read(keys_file)
    cloud = LocalAws(
        AwsOptions(
            nodes_directory=nodes_directory,
            environment={
                **process_environment(marker),
                **aws_variables("http://127.0.0.1", keys),
                **json.loads(instance_environment),
            },
            conditions=CONDITIONS.decode(conditions),
            keys=keys,
            port=port,
            seed=seed,
            network_name=network_name,
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: cloud.stop())
    cloud.start()
    ready = {
        "url": cloud.url,
        "pid": str(os.getpid()),
        "seed": str(seed),
        "control_planes": " ".join(f"{address}:{port}" for address, port in cloud.control_planes),
    }
    write_private(ready_file, json.dumps(ready).encode())
    cloud.run()
    logging.shutdown()
    os._exit(
        0
    )  # Python would first take apart what moto has in memory, which takes longer than all else that ends here


class _Printed:
    """Progress for a person: a spinner while a step runs, a line when it is done."""

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show one step."""
        began = time.monotonic()
        with console.status(f"{title} …"):
            yield
        console.print(f"[green]✓[/green] {title} [dim]({time.monotonic() - began:.1f} s)[/dim]")


def main() -> None:
    """Run the command line; operating errors are one line on stderr."""
    try:
        app(prog_name="everstep local")
    except (LocalCloudError, UnusableKeys) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
