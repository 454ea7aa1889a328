"""Prepares a job's input channels, secrets, role credentials and packages for its ranks.

Invariant: a rank starts only when all of these inputs are ready.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from everstep.protocol.agent_messages import FaultCode
from everstep.protocol.ids import RunId
from everstep.protocol.plan import GenerationPlan, PlanNode, channel_variable
from worker.errors import InputRefused, LoadFailed, RequirementsRefused, StorageError, StoreRefused
from worker.node.full_disks import says_full
from worker.node.rank_user import RankUser, user_of
from worker.provisioning.credentials import RoleCredentials
from worker.provisioning.inputs import InputCache
from worker.provisioning.packages import InstallationOrder, PackageLayers
from worker.ranks.environment import Packages, Supplied, source_folder
from worker.ranks.files import RankFiles
from worker.shm.store import in_thread
from worker.storage.aws import Aws, JobPrincipal, RoleKeys
from worker.storage.object_store import ObjectStore


@dataclass(eq=False, repr=False)
class Supplies:
    """Prepares all inputs of a generation's ranks. The agent owns the object.

    `now` is Unix time in seconds. `input_bytes` is None for the disk's size minus a reserve.
    """

    state: Path
    objects: ObjectStore
    aws: Aws
    _: KW_ONLY
    now: Callable[[], float]
    input_bytes: int | None = None
    user: RankUser | None = None
    allows_builds: bool = False

    def __post_init__(self) -> None:
        self._inputs = InputCache(self.state, self.input_bytes, self.user)
        self._packages = PackageLayers(self.state, user=self.user, allows_builds=self.allows_builds)
        self._credentials = RoleCredentials(self.state, self.aws, self.now)

    async def gather(self, plan: GenerationPlan, key: bytes, here: PlanNode, entry: Path) -> Supplied:
        """Prepare all inputs of a generation's ranks on this node. A repeated call reuses the files on disk.

        `entry` is the path of the script. Raises LoadFailed, with a sentence for the user, if an input cannot be
        provided, and OSError if the disk is full.
        """
        keys = await self._assume(plan, key)  # Assume the role first, because AWS refuses a wrong role at once.
        secrets = await self._secrets(plan, keys)
        packages = await self._install(plan, here, entry)
        channels = await self._channels(plan)
        role = self._credentials.variables() if keys is not None else {}
        return Supplied(environment={**secrets, **channels, **role}, packages=packages)

    @property
    def refused_count(self) -> int:
        """Number of requests for AWS credentials that the node refused, because they had no valid token."""
        return self._credentials.refused_count

    async def adopt(self, plan: GenerationPlan, key: bytes) -> None:
        """Serve credentials to ranks that an earlier agent process of this node started."""
        if plan.script.role_arn:
            await self._credentials.adopt(plan, key)

    async def withdraw(self) -> None:
        """Stop serving AWS credentials to a generation's ranks. The agent calls this after the ranks have ended."""
        await self._credentials.withdraw()

    async def close(self) -> None:
        """Stop the server from which ranks request AWS credentials."""
        await self._credentials.close()

    async def _assume(self, plan: GenerationPlan, key: bytes) -> RoleKeys | None:
        if not plan.script.role_arn:
            return None
        try:
            return await self._credentials.begin(plan, key)
        except StorageError as error:
            raise LoadFailed.lacking(plan.parent, FaultCode.ROLE_UNAVAILABLE, f"RoleArn: {error}", error) from error

    async def _secrets(self, plan: GenerationPlan, keys: RoleKeys | None) -> dict[str, str]:
        """Read the job's secrets, again at each start of the ranks, so that no secret is stored on the node."""

        def read(cancelled: threading.Event) -> dict[str, str]:
            values = {}
            for variable, reference in plan.script.secrets.items():
                if cancelled.is_set():
                    break
                try:
                    values[variable] = self.aws.secret(reference, keys)
                    if "\0" in values[variable]:
                        raise StoreRefused(
                            f"{reference} contains a zero byte, which an environment variable cannot contain"
                        )
                except StorageError as error:
                    raise LoadFailed.lacking(
                        plan.parent, "secret_unavailable", f"Secrets.{variable}: {error}", error
                    ) from error
            return values

        return await in_thread(read) if plan.script.secrets else {}

    async def _channels(self, plan: GenerationPlan) -> dict[str, str]:
        inputs = plan.script.inputs
        if not inputs:
            return {}

        def fetch(cancelled: threading.Event) -> dict[str, Path]:
            principal = JobPrincipal.of(plan)
            objects = self.aws.objects(principal) if principal.role_arn else self.objects
            return self._inputs.fetch(objects, principal, inputs, cancelled)

        try:
            found = await in_thread(fetch)
        except InputRefused as error:
            raise LoadFailed.lacking(plan.parent, "input_unavailable", str(error), error) from error
        except StorageError as error:
            raise LoadFailed.lacking(plan.parent, FaultCode.ROLE_UNAVAILABLE, f"RoleArn: {error}", error) from error
        paths = {name: str(path) for name, path in found.items()}
        return {
            "EVERSTEP_INPUT_CHANNELS": json.dumps(paths),
            **{channel_variable(name): path for name, path in paths.items()},
        }

    async def _install(self, plan: GenerationPlan, here: PlanNode, entry: Path) -> Packages:
        """Install the job's packages. pip's output appears in the job's log, as lines of the node's first rank."""
        if not plan.script.requirements:
            return Packages()
        if pip_variables := sorted(name for name in plan.script.environment if name.startswith("PIP_")):
            words = (
                f"Environment.{pip_variables[0]}: pip does not read the job's variables. Write its options into "
                f"{plan.script.requirements} (--index-url …)"
            )
            raise LoadFailed.lacking(plan.parent, "requirements_failed", words)
        order = InstallationOrder(
            project=plan.script.project or plan.run,
            source=source_folder(entry, plan.script.entry_point),
            source_sha256=plan.script.source.sha256,
            requirements=plan.script.requirements,
            environment=os.environ,
            user=user_of(plan.run, self.state, self.user),
            output=RankFiles(self.state.absolute(), plan.run, plan.generation, here.ranks[0]).stdout,
        )
        try:
            return await self._packages.install(order)
        except RequirementsRefused as error:
            if says_full(str(error)):
                raise LoadFailed(FaultCode.DISK_FULL, f"Requirements: {error}", is_permanent=False) from error
            # pip reports a missing package and an unreachable index with the same error. If the job has trained before,
            # the index is probably unreachable.
            raise LoadFailed.lacking(plan.parent, "requirements_failed", f"Requirements: {error}") from error

    async def forget(self, run: RunId) -> None:
        """Delete the folders with input files that this node has prepared for `run`."""
        await asyncio.to_thread(self._inputs.forget, run)


def wait_for_start(plan: GenerationPlan) -> bool:
    """Return whether the ranks may start only after all nodes have loaded their shards and inputs. Pure."""
    # A node on which the job has not run before may fetch inputs for hours. Ranks on the other nodes would then time
    # out in the rendezvous of torch.distributed.
    fetches = bool(plan.script.requirements) or any(channel.prefix is not None for channel in plan.script.inputs)
    return fetches and any(not rank.sources or rank.sources[0].kind != "local" for rank in plan.ranks)
