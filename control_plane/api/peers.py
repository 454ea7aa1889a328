"""Reaches the other control-plane servers of an installation.

The agents of a fleet report only to its managing server, which holds the fleet's lease
(docs/adr/0021-one-replica-serves-a-fleet.md). The lease contains its URL (`control_plane.replica`). While this server
manages all fleets, no method reads the database or the network.

    what a client needs        how another server provides it
    facts about agents         `agents` reads GET /replicas/agents of the managing server and merges the facts
    requests to agents         `control_plane.api.forwarding` forwards the request to the managing server
    connections of agents      `control_plane.api.relay` relays the frames to the managing server
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import httpx
import msgspec
from sqlalchemy.orm import Session

from control_plane.certificates import ServerAuthority
from control_plane.db import jobs
from control_plane.db.leases import owner_of
from control_plane.db.session import Database
from control_plane.loop.agents import AgentRegistry, AgentView
from control_plane.replica import url_of
from everstep.protocol.agent_messages import MemberReport
from everstep.protocol.errors import UNDECODABLE
from everstep.protocol.ids import FleetName, NodeId

log = logging.getLogger(__name__)

FORWARDED: Final = "everstep-forwarded"
"""Header with the original request's id, which no server forwards again."""
PATH: Final = "/replicas/agents"
FACTS_SECONDS: Final = 0.5
"""Seconds for which another server's answer about agents is reused, or assumed empty after a failure."""
CONNECT_SECONDS: Final = 2.0
TAKEOVER_CHECK_SECONDS: Final = 1.0
"""Seconds between two checks of `Peers.taken_over`."""
ANSWER_SECONDS: Final = 75.0
"""Seconds for the next bytes of another server's response; more than the 55 s of an ExecuteCommand call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAgents:
    """The state of agents, as the servers to which they are connected report it."""

    views: Mapping[NodeId, AgentView]
    """State by node, disconnected agents included."""
    refused: Mapping[NodeId, int]
    """Rejected messages by the sending agent's node. Nodes without any can be missing."""

    @property
    def connected(self) -> Mapping[NodeId, AgentView]:
        """State of each agent that is connected now."""
        return {node_id: view for node_id, view in self.views.items() if view.is_connected}


NOTHING: Final = KnownAgents(views={}, refused={})
_DECODER: Final = msgspec.msgpack.Decoder(KnownAgents)


class Peers:
    """The other servers of an installation.

    `registry` has the agents of this server, and the fleets that others manage. All servers derive `key` from the
    server secret. `authority` None: only public authorities are trusted.
    """

    def __init__(
        self,
        database: Database,
        registry: AgentRegistry,
        key: str,
        authority: ServerAuthority | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key = key
        self.registry = registry
        self.authority = authority
        self._database = database
        self._monotonic = monotonic
        self._facts: dict[str, tuple[float, KnownAgents]] = {}
        """Newest answer by URL, with its time."""
        self._reading = threading.Lock()
        self._client: httpx.Client | None = None
        self._http: httpx.AsyncClient | None = None

    def url_of(self, fleet: FleetName) -> str:
        """Return the URL of the other server that manages a fleet, or empty. Blocks on the database."""
        if not self.registry.is_elsewhere(fleet):
            return ""
        with self._database.read() as session:
            return _holder(session, fleet)

    async def taken_over(self, fleet: FleetName) -> None:
        """Wait until this server's loops observe that no other server manages `fleet`."""
        seen = 0
        while self.registry.is_elsewhere(fleet):
            seen = await self.registry.wait_for_change(seen, TAKEOVER_CHECK_SECONDS)

    def holder_of_job(self, text: str, project: str | None) -> tuple[FleetName, str] | None:
        """Return a job's fleet and the URL of the other server that manages it. Blocks on the database.

        None if no job or several jobs of the project (None: all) match, or if no other server manages the fleet.
        """
        with self._database.read() as session:
            found = jobs.named(session, text, project)
            if len(found) != 1 or not self.registry.is_elsewhere(FleetName(found[0].fleet_name)):
                return None
            fleet = FleetName(found[0].fleet_name)
            url = _holder(session, fleet)
            return (fleet, url) if url else None

    def agents(self) -> KnownAgents:
        """Return the state of all agents of all servers. Blocks on the database and on those servers.

        Agents of a server that does not answer within `CONNECT_SECONDS` are missing.
        """
        own = self.own()
        elsewhere = self.registry.elsewhere
        if not elsewhere:
            return own
        with self._database.read() as session:
            urls = {url for fleet in sorted(elsewhere) if (url := _holder(session, fleet))}
        views = {node_id: view for node_id, view in own.views.items() if view.fleet not in elsewhere}
        refused = Counter(own.refused)
        for facts in map(self._facts_of, sorted(urls)):
            views |= {node_id: view for node_id, view in facts.views.items() if view.fleet in elsewhere}
            refused.update(facts.refused)
        return KnownAgents(views=views, refused=refused)

    def own(self) -> KnownAgents:
        """Return the state of this server's own agents."""
        return KnownAgents(views=self.registry.views(), refused=self.registry.refusals())

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """TLS settings that trust the installation's authority, and the machine's or those in $SSL_CERT_FILE."""
        context = ssl.create_default_context()
        if self.authority is not None:
            context.load_verify_locations(cadata=self.authority.certificate)
        return context

    def http(self) -> httpx.AsyncClient:
        """Return the client for forwarded requests, which `close` closes. Call it on the event loop."""
        if self._http is None:
            self._http = httpx.AsyncClient(
                verify=self.tls,
                trust_env=False,
                timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            )
        return self._http

    async def close(self) -> None:
        """Close all connections to other servers."""
        if self._http is not None:
            await self._http.aclose()
        if self._client is not None:
            self._client.close()

    def _facts_of(self, url: str) -> KnownAgents:
        """Return the state of another server's agents, at most `FACTS_SECONDS` old. Waiting threads share a request."""
        with self._reading:
            read_at, facts = self._facts.get(url, (float("-inf"), NOTHING))
            if self._monotonic() - read_at >= FACTS_SECONDS:
                facts = self._read(url)
                self._facts[url] = self._monotonic(), facts
            return facts

    def _read(self, url: str) -> KnownAgents:
        if self._client is None:
            self._client = httpx.Client(verify=self.tls, trust_env=False, timeout=CONNECT_SECONDS)
        try:
            answer = self._client.get(f"{url}{PATH}", headers={"authorization": f"Bearer {self.key}"})
            return decoded(answer.raise_for_status().content)
        except (httpx.HTTPError, *UNDECODABLE) as error:
            log.warning("the server at %s does not report its agents: %s", url, str(error) or type(error).__name__)
            return NOTHING


def encoded(known: KnownAgents) -> bytes:
    """Encode those parts of agents' states that API responses use."""
    return msgspec.msgpack.encode(
        replace(known, views={node_id: _shown(view) for node_id, view in known.views.items()})
    )


def decoded(data: bytes) -> KnownAgents:
    """Decode the agents' states of another server. Raises msgspec.MsgspecError if its version is incompatible."""
    return _DECODER.decode(data)


def _shown(view: AgentView) -> AgentView:
    report = view.report
    if report is None:
        return view
    member = report.member
    if member is not None:
        member = MemberReport(
            job=member.job,
            run=member.run,
            generation=member.generation,
            phase=member.phase,
            faults=member.faults,
        )
    short = msgspec.structs.replace(report, member=member, metrics=None, notices=(), sources=(), evidence_key="")
    return replace(view, report=short)


def _holder(session: Session, fleet: str) -> str:
    return url_of(owner_of(session, "fleet", fleet) or "")
