"""What ranks are given besides their state: the directories of their job's input channels, its secrets,
and what its requirements.txt asks for.

    Load ─▶ Supplies.gather ─▶ Supplied, beside the fetching of shards ─▶ the environment of each rank

Invariant: a rank is started with all of it or not at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from everstep.protocol.agent_messages import FaultCode
from everstep.protocol.ids import RunId
from everstep.protocol.plan import GenerationPlan, PlanNode, channel_variable
from worker.errors import InputRefused, LoadFailed, RequirementsRefused, StorageError, StoreRefused
from worker.node.full_disks import says_full
from worker.node.rank_user import RankUser, user_of
from worker.provisioning.credentials import RoleCredentials
from worker.provisioning.inputs import InputCache
from worker.provisioning.packages import Order, PackageLayers
from worker.ranks.environment import Packages, Supplied, source_folder
from worker.ranks.files import RankFiles
from worker.shm.store import in_thread
from worker.storage.aws import Aws, RoleKeys, session_name_of
from worker.storage.object_store import ObjectStore


class Supplies:
    """One owner: the agent.

    Args:
        state: the agent's directory.
        objects: S3, with the node's permissions.
        aws: the rest of AWS, with the node's permissions.
        now: Unix time, seconds.
        input_bytes: what inputs may take of the disk; None: what it has, less a part.
        user: the users of this node's ranks; None: the agent's.
        allows_builds: pip may build packages for a job.
    """

    def __init__(
        self,
        state: Path,
        objects: ObjectStore,
        aws: Aws,
        *,
        now: Callable[[], float],
        input_bytes: int | None = None,
        user: RankUser | None = None,
        allows_builds: bool = False,
    ) -> None:
        self._state = state
        self._user = user
        self._objects = objects
        self._aws = aws
        self._inputs = InputCache(state, input_bytes, user)
        self._packages = PackageLayers(state, user=user, allows_builds=allows_builds)
        self._credentials = RoleCredentials(state, aws, now)

    async def gather(self, plan: GenerationPlan, key: bytes, here: PlanNode, entry: Path) -> Supplied:
        """Have everything that the ranks of a generation need. Doing it again costs little.

        Once a generation, and once more by a restarted agent.

        Args:
            plan: of the generation.
            key: of the generation.
            here: this node in it.
            entry: the script, in its unpacked source tree.

        Returns:
            What its ranks on this node are started with.

        Raises:
            LoadFailed: with a code and a sentence for the user.
            OSError: the disk is full.
        """
        keys = await self._assume(plan, key)  # the quickest to fail comes first
        secrets = await self._secrets(plan, keys)
        packages = await self._install(plan, here, entry)
        channels = await self._channels(plan)
        role = self._credentials.variables() if keys is not None else {}
        return Supplied(environment={**secrets, **channels, **role}, packages=packages)

    @property
    def refused_count(self) -> int:
        """How many questions for keys had no token of a job that runs here."""
        return self._credentials.refused_count

    async def adopt(self, plan: GenerationPlan, key: bytes) -> None:
        """Serve ranks that an earlier agent of this node has started."""
        if plan.script.role_arn:
            await self._credentials.adopt(plan, key)

    async def withdraw(self) -> None:
        """Serve the ranks of the generation no more: they are gone."""
        await self._credentials.withdraw()

    async def close(self) -> None:
        """Let go of what this agent holds open."""
        await self._credentials.close()

    async def _assume(self, plan: GenerationPlan, key: bytes) -> RoleKeys | None:
        """Have the keys of the job's role, which its ranks get from then on; without one there are none for them."""
        if not plan.script.role_arn:
            return None
        try:
            return await self._credentials.begin(plan, key)
        except StorageError as error:
            raise LoadFailed.lacking(
                plan.parent, FaultCode.ROLE_UNAVAILABLE, f"RoleArn: {error}", is_passing=error.retryable
            ) from error

    async def _secrets(self, plan: GenerationPlan, keys: RoleKeys | None) -> dict[str, str]:
        """Read them anew for each launch: one that was changed meanwhile has its new value, and none is kept on the node."""

        def read(cancelled: threading.Event) -> dict[str, str]:
            values = {}
            for variable, reference in plan.script.secrets.items():
                if cancelled.is_set():
                    break
                try:
                    values[variable] = self._aws.secret(reference, keys)
                    if "\0" in values[variable]:
                        raise StoreRefused(f"{reference}: it contains a zero byte, and a variable cannot")
                except StorageError as error:
                    raise LoadFailed.lacking(
                        plan.parent, "secret_unavailable", f"Secrets.{variable}: {error}", is_passing=error.retryable
                    ) from error
            return values

        return await in_thread(read) if plan.script.secrets else {}

    async def _channels(self, plan: GenerationPlan) -> dict[str, str]:
        inputs = plan.script.inputs
        if not inputs:
            return {}

        def fetch(cancelled: threading.Event) -> dict[str, Path]:
            role = plan.script.role_arn
            objects = self._aws.objects(role, session_name_of(plan.job)) if role else self._objects
            return self._inputs.fetch(objects, plan.run, inputs, cancelled, reader=role)

        try:
            found = await in_thread(fetch)
        except InputRefused as error:
            raise LoadFailed.lacking(
                plan.parent, "input_unavailable", str(error), is_passing=error.is_passing
            ) from error
        except StorageError as error:
            raise LoadFailed.lacking(
                plan.parent, FaultCode.ROLE_UNAVAILABLE, f"RoleArn: {error}", is_passing=error.retryable
            ) from error
        paths = {name: str(path) for name, path in found.items()}
        return {
            "EVERSTEP_INPUT_CHANNELS": json.dumps(paths),
            **{channel_variable(name): path for name, path in paths.items()},
        }

    async def _install(self, plan: GenerationPlan, here: PlanNode, entry: Path) -> Packages:
        """Install what is asked for; pip's words are lines of the job's log, as those of the node's first rank."""
        if not plan.script.requirements:
            return Packages()
        if told := sorted(name for name in plan.script.environment if name.startswith("PIP_")):
            words = (
                f"Environment.{told[0]}: pip does not read the job's variables. Write its options into "
                f"{plan.script.requirements} (--index-url …)"
            )
            raise LoadFailed.lacking(plan.parent, "requirements_failed", words, is_passing=False)
        order = Order(
            project=plan.script.project or plan.run,
            source=source_folder(entry, plan.script.entry_point),
            source_sha256=plan.script.source.sha256,
            requirements=plan.script.requirements,
            environment=os.environ,
            user=user_of(plan.run, self._state, self._user),
            output=RankFiles(self._state.absolute(), plan.run, plan.generation, here.ranks[0]).stdout,
        )
        try:
            return await self._packages.install(order)
        except RequirementsRefused as error:
            if says_full(str(error)):
                raise LoadFailed(FaultCode.DISK_FULL, f"Requirements: {error}", is_permanent=False) from error
            # pip does not say whether its package is missing or its index: a job that has trained tries again.
            raise LoadFailed.lacking(
                plan.parent, "requirements_failed", f"Requirements: {error}", is_passing=False
            ) from error

    async def forget(self, run: RunId) -> None:
        """Let go of what a run alone needed on this node."""
        await asyncio.to_thread(self._inputs.forget, run)


def wait_for_start(plan: GenerationPlan) -> bool:
    """Say whether the ranks of a generation start only when all nodes have loaded, not while they load. Pure.

    A node that is new to a job may fetch for hours; ranks of the others would wait for its ranks in their rendezvous,
    and give up.

    Args:
        plan: of the generation.

    Returns:
        Whether there is something to fetch, and a node that may not have it: one whose ranks' state is not on it.
    """
    fetches = bool(plan.script.requirements) or any(channel.prefix is not None for channel in plan.script.inputs)
    return fetches and any(not rank.sources or rank.sources[0].kind != "local" for rank in plan.ranks)
