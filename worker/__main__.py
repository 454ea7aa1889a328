"""Entry point of the agent: `python -P -m worker`, which `everstep agent` starts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import platform
import re
import resource
import signal
import ssl
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

import everstep
from everstep.host.log_records import LOG_FORMATS, JsonFormatter, TextFormatter
from everstep.host.loopback import is_loopback, url_host
from everstep.host.service_manager import ServiceManager
from everstep.protocol.attestation import SERVER_ID_PATTERN
from everstep.protocol.ids import NodeId
from everstep.protocol.rank_messages import unordered_machine
from worker.agent.agent import Agent
from worker.agent.attestation import Claim
from worker.agent.own_log import OwnLog
from worker.agent.settings import AgentSettings
from worker.errors import UserRefused
from worker.node import metadata_rule, rank_user
from worker.node.health.gpus import gpu_reader
from worker.node.health.memory import memory_facts
from worker.node.health.watch import HealthWatch
from worker.node.instance_metadata import InstanceMetadata, endpoint_of
from worker.node.priority import AGENT_NICENESS, lead_own_session, work_at
from worker.node.unix_socket import make_socket_folder
from worker.ranks.shim.cgroups import JobLimits
from worker.ranks.supervisor import Supervisor, scope_command
from worker.shm.held_files import allow_huge_pages
from worker.storage.node_aws import NodeAws
from worker.storage.s3 import s3_store

SOCKETS = Path("/dev/shm")
"""Its path is short, because a socket's address has at most 107 bytes."""


def settings(arguments: list[str]) -> AgentSettings:
    """Return the agent's settings from the command line without the program's name, and the environment.

    The state directory exists with mode 0700. Raises SystemExit if a setting is missing or invalid.
    """
    environment = os.environ
    parser = argparse.ArgumentParser(
        prog="everstep agent", description="Runs the agent of one node. A systemd unit starts one agent per instance."
    )
    parser.add_argument(
        "--control-plane-url",
        required=True,
        action="append",
        help="http or https URL of the control plane; repeat the option for each server with its own URL",
    )
    parser.add_argument(
        "--join-token",
        default=environment.get("EVERSTEP_JOIN_TOKEN", ""),
        help="token from `everstep fleets join-token`, needed once per instance. Prefer EVERSTEP_JOIN_TOKEN, because "
        "the list of processes shows options",
    )
    parser.add_argument(
        "--fleet",
        default=environment.get("EVERSTEP_FLEET"),
        help="fleet that this instance joins with its role instead of a token (EVERSTEP_FLEET)",
    )
    parser.add_argument(
        "--server-id",
        default=environment.get("EVERSTEP_SERVER_ID"),
        help="id of the server for which the role signs; the server logs its id at start (EVERSTEP_SERVER_ID)",
    )
    parser.add_argument(
        "--region",
        default=environment.get("AWS_REGION"),
        help="region of the control plane (AWS_REGION), for --fleet; also the default region for secrets and S3",
    )
    parser.add_argument(
        "--ca-bundle",
        type=Path,
        default=environment.get("EVERSTEP_CA_BUNDLE"),
        help="PEM file with the authority of the control plane's certificate, if you run your own authority "
        "(EVERSTEP_CA_BUNDLE)",
    )
    parser.add_argument(
        "--allow-non-loopback",
        action="store_true",
        help="permit tokens over plain http to another machine; only for networks that you trust",
    )
    parser.add_argument(
        "--instance-id",
        default=environment.get("EVERSTEP_INSTANCE_ID"),
        help="EC2 instance id (EVERSTEP_INSTANCE_ID; default on EC2: from the instance's metadata)",
    )
    parser.add_argument(
        "--address",
        default=environment.get("EVERSTEP_ADDRESS"),
        help="address at which peers reach this node (EVERSTEP_ADDRESS; default on EC2: from the instance's metadata)",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=environment.get("EVERSTEP_STATE_DIR", "/var/lib/everstep"),
        help="folder for the agent's state, logs and outputs (EVERSTEP_STATE_DIR; default %(default)s)",
    )
    parser.add_argument(
        "--memory-bytes",
        type=int,
        default=environment.get("EVERSTEP_NODE_MEMORY_BYTES"),
        help="maximum host memory of all slots (EVERSTEP_NODE_MEMORY_BYTES; default: half of the memory)",
    )
    parser.add_argument(
        "--input-bytes",
        type=int,
        default=environment.get("EVERSTEP_INPUT_BYTES"),
        help="maximum disk space of jobs' inputs, including inputs cached for later jobs (EVERSTEP_INPUT_BYTES; "
        "default: 95 percent of the disk)",
    )
    parser.add_argument(
        "--rank-user",
        default=environment.get("EVERSTEP_RANK_USER") or None,
        help="one user for the ranks of all jobs, if the agent is root: a name, uid or uid:gid "
        "(EVERSTEP_RANK_USER; by default each job has "
        f"its own uid, from {rank_user.NUMBER + 1} to {rank_user.NUMBER + rank_user.UID_COUNT}, and "
        "the groups of the user everstep-ranks); root: ranks run as the agent",
    )
    parser.add_argument(
        "--ranks-slice",
        default=environment.get("EVERSTEP_RANKS_SLICE", ""),
        help="systemd slice in which ranks run, with the slice's limits of memory and processes; needs root "
        "(EVERSTEP_RANKS_SLICE; by default, ranks run in the cgroup of the agent)",
    )
    parser.add_argument(
        "--job-memory-bytes",
        type=int,
        default=environment.get("EVERSTEP_JOB_MEMORY_BYTES"),
        help="maximum memory of a job's ranks on this node together, with their files in /dev/shm; needs cgroup v2 and "
        "--ranks-slice (EVERSTEP_JOB_MEMORY_BYTES; by default, only the slice limits them)",
    )
    parser.add_argument(
        "--job-tasks",
        type=int,
        default=environment.get("EVERSTEP_JOB_TASKS"),
        help="maximum number of processes and threads of a job's ranks on this node together, also if they run as "
        "root; needs what --job-memory-bytes needs (EVERSTEP_JOB_TASKS)",
    )
    parser.add_argument(
        "--allow-builds",
        action="store_true",
        default=environment.get("EVERSTEP_ALLOW_BUILDS") == "1",
        help="allow pip to build packages without a wheel for jobs' requirements; a build runs the package's code "
        "(EVERSTEP_ALLOW_BUILDS=1)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=None,
        help="port for Prometheus, over plain http and without a token; no port by default",
    )
    parser.add_argument(
        "--metrics-address", default="127.0.0.1", help="address of the Prometheus port (default %(default)s)"
    )
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default=environment.get("EVERSTEP_LOG_FORMAT", "text"),
        help="text for people, or json with one object per line, with job, node and generation (EVERSTEP_LOG_FORMAT)",
    )
    # Environment files that were written for earlier agents may contain this option. It has no effect.
    parser.add_argument("--replica-transport", help=argparse.SUPPRESS)
    parser.add_argument("--peer-port", type=int, default=0, help="port for other agents; 0: the kernel chooses")
    parser.add_argument(
        "--cold",
        action="store_true",
        help="start ranks without the template process, from which ranks are otherwise forked",
    )
    given = parser.parse_args(arguments)
    endpoint = endpoint_of(environment)
    if endpoint is not None and not (given.instance_id and given.address):
        try:
            identity = InstanceMetadata(endpoint, lambda: None).identity()
        except OSError as error:
            parser.error(f"--instance-id or --address is missing, and its default is unavailable: {error}")
        given.instance_id = given.instance_id or identity.instance_id
        given.address = given.address or identity.address
        given.region = given.region or identity.region
    if obstacle := unordered_machine(platform.machine()):
        parser.error(obstacle)
    for url in given.control_plane_url:
        if not url_host(url):
            parser.error(f"--control-plane-url {url!r} is not an http or https URL")
        if urlsplit(url).scheme == "http" and not is_loopback(url) and not given.allow_non_loopback:
            parser.error(
                f"--control-plane-url {url} is plain http to another machine: the token would cross the network "
                "unencrypted. Use the https URL, or add --allow-non-loopback if the network is yours"
            )
    if bool(given.fleet) != bool(given.server_id) or (given.fleet and not given.region):
        parser.error("to join by the instance's role, --fleet, --server-id and --region are all needed")
    if given.server_id and re.fullmatch(SERVER_ID_PATTERN, given.server_id) is None:
        parser.error(f"--server-id {given.server_id!r} is not a server id. The server logs its id at start.")
    try:
        tls = ssl.create_default_context(cafile=given.ca_bundle) if given.ca_bundle else None
    except OSError as error:
        parser.error(f"--ca-bundle {given.ca_bundle} contains no certificates: {error}")
    if not given.instance_id:
        parser.error("the instance id is missing: pass --instance-id or set EVERSTEP_INSTANCE_ID")
    if not given.address:
        parser.error("the address of this node is missing: pass --address or set EVERSTEP_ADDRESS")
    state = given.state_dir.resolve()
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    if given.metrics_port is not None and not 0 <= given.metrics_port <= 65_535:
        parser.error(f"--metrics-port {given.metrics_port} is not a port")
    for name, value in (("--job-memory-bytes", given.job_memory_bytes), ("--job-tasks", given.job_tasks)):
        if value is not None and value < 1:
            parser.error(f"{name} {value} is below 1: a job needs some, or leave the option out")
    if given.log_format not in LOG_FORMATS:
        parser.error(f"EVERSTEP_LOG_FORMAT {given.log_format!r} is not one of {', '.join(LOG_FORMATS)}")
    try:
        user = rank_user.choose(given.rank_user, os.getuid())
    except UserRefused as error:
        parser.error(f"--rank-user: {error}")
    return AgentSettings(
        node_id=NodeId(given.instance_id),
        address=given.address,
        state=state,
        sockets=SOCKETS / f"everstep-{os.getuid()}-{given.instance_id}",
        memory_bytes=int(given.memory_bytes or memory_facts().total_bytes // 2),
        control_plane_urls=tuple(given.control_plane_url),
        join_token=given.join_token,
        peer_port=given.peer_port,
        input_bytes=int(given.input_bytes) if given.input_bytes else None,
        tls=tls,
        claim=Claim(
            node_id=NodeId(given.instance_id), fleet=given.fleet, region=given.region, server_id=given.server_id
        )
        if given.fleet
        else None,
        is_warm=not given.cold,
        rank_user=user,
        allows_builds=given.allow_builds,
        metadata_endpoint=endpoint,
        metrics_address=(given.metrics_address, given.metrics_port) if given.metrics_port is not None else None,
        log_format=given.log_format,
        ranks_slice=given.ranks_slice,
        job_limits=JobLimits(given.job_memory_bytes, given.job_tasks),
    )


def aws_environment(chosen: AgentSettings, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment for AWS clients, with the region of --region as the default region."""
    return environment if chosen.claim is None else {"AWS_DEFAULT_REGION": chosen.claim.region, **environment}


def confine(chosen: AgentSettings) -> str:
    """Check that ranks can run as their Linux user, and block this user from the instance's metadata.

    Return a sentence that names what a job's code can reach beyond its own job, or an empty string. Raises SystemExit
    if the ranks' user cannot use Python or the agent's folders.
    """
    user, endpoint = chosen.rank_user, chosen.metadata_endpoint
    if user is None:
        words = "ranks run as the agent's user: a job's code can read the agent's files"
        return f"{words}, and ask the instance's metadata for the keys of its role" if endpoint is not None else words
    for folder in (chosen.state, chosen.sockets):
        rank_user.create_traversable_dir(folder, user)
    if closed := rank_user.closed_to(
        user, (Path(everstep.__file__), Path(msgspec.__file__), chosen.state, chosen.sockets)
    ):
        raise SystemExit(
            f"ranks should run as {user.name} (uid {user.uid}), who cannot use {closed}: let other users pass "
            "through the folders above it (chmod o+x), "
            "or put Python and --state-dir elsewhere; --rank-user root runs ranks as this agent"
        )
    uids = (
        f"uid {user.uid}"
        if user.uid_count == 1
        else f"uids {user.uid} to {user.uid + user.uid_count - 1}, one for each job"
    )
    logging.getLogger("worker").info("ranks run as %s (%s)", user.name, uids)
    if endpoint is None:
        return ""
    is_covered = metadata_rule.is_covered(endpoint)
    return metadata_rule.exposure_of(
        metadata_rule.keep_away(user)
        if is_covered
        else f"{endpoint} is not an EC2 metadata address, so no rule covers it"
    )


async def serve(agent: Agent, manager: ServiceManager) -> None:
    """Run the agent until SIGTERM or SIGINT. The ranks and snapshots remain for the next agent process."""
    task = asyncio.create_task(agent.run(), name="agent")
    alive = asyncio.create_task(manager.keep_alive(), name="systemd's watchdog")
    manager.notify("READY=1")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        alive.cancel()


def allow_files() -> None:
    """Raise the limit of open files to the hard limit, for this process and its children."""
    # systemd starts services with a limit of 1,024 files. Rank 0 has one connection to each other rank.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def start_log() -> OwnLog:
    """Configure Python's logging: lines go to stderr, and the returned handler keeps the newest lines in memory."""
    logging.basicConfig(level=os.environ.get("EVERSTEP_LOG_LEVEL", "INFO"), stream=sys.stderr)
    own_log = OwnLog()
    logging.getLogger().addHandler(own_log)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    return own_log


def main() -> None:
    """Start the agent and run it until it is stopped."""
    faulthandler.enable()  # Print the stacks when systemd's watchdog aborts this process.
    manager = ServiceManager()
    own_log = start_log()
    chosen = settings(sys.argv[1:])
    lead_own_session()
    allow_files()
    work_at(AGENT_NICENESS)
    gpus = gpu_reader()
    try:
        make_socket_folder(chosen.sockets)
    except OSError as error:
        raise SystemExit(f"{chosen.sockets}: {error.strerror}") from error
    allow_huge_pages()
    chosen = replace(chosen, exposure=confine(chosen))
    if chosen.exposure:
        logging.getLogger("worker").warning("%s", chosen.exposure)
    supervisor = Supervisor(
        state=chosen.state,
        socket=chosen.sockets / "shim.sock",
        address=chosen.address,
        is_warm=chosen.is_warm,
        cgroup=chosen.sockets.name,
        user=chosen.rank_user,
        launcher=scope_command(chosen.ranks_slice) if chosen.ranks_slice else (),
        limits=chosen.job_limits,
    )
    health = HealthWatch(gpus, state=chosen.state)
    environment = aws_environment(chosen, os.environ)
    agent = Agent(
        chosen, s3_store(environment), NodeAws(environment), supervisor, now=time.time, health=health, own_log=own_log
    )
    if chosen.log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter(agent.log_fields))
    asyncio.run(serve(agent, manager))


if __name__ == "__main__":
    main()
