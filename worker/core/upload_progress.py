"""The progress of one upload to S3, and the message about a stalled upload."""

from __future__ import annotations

from dataclasses import dataclass, replace

from everstep.protocol.agent_messages import RunningUpload
from everstep.protocol.ids import Rank, Step

# A part of 32 MiB that takes longer is sent at less than 0.6 MB/s.
STALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadProgress:
    """Progress of one running upload of a shard."""

    rank: Rank
    step: Step
    moved_at: float
    """Monotonic time of the newest progress: the start of an attempt, a digested piece, or the end of a part."""
    name: str = ""
    """s3://bucket/key; empty until the first attempt begins."""
    object_bytes: int = 0
    """Until the first attempt begins, the size of the shard in memory."""
    stored_bytes: int = 0
    awaited: str = ""
    """Name of another rank's object for which this upload waits; otherwise empty."""

    def begun(self, name: str, object_bytes: int, now: float) -> UploadProgress:
        """Return the progress at the start of an attempt. Each attempt uploads to a new S3 URI (`name`)."""
        return replace(self, name=name, object_bytes=object_bytes, stored_bytes=0, awaited="", moved_at=now)

    def waiting(self, name: str, now: float) -> UploadProgress:
        """Record that the upload waits for another rank's object. The first call for it counts as progress."""
        return self if name == self.awaited else replace(self, awaited=name, moved_at=now)

    def digested(self, now: float) -> UploadProgress:
        """Return the progress after the node has digested a piece of shared tensors."""
        # These digests precede the first byte to S3, and can take minutes for large tensors.
        return replace(self, moved_at=now)

    def stored(self, part_bytes: int, now: float) -> UploadProgress:
        """Return the progress after S3 has stored a part."""
        # Both a helper and the owner may store the same part, so the sum is limited to the object's size.
        return replace(self, stored_bytes=min(self.stored_bytes + part_bytes, self.object_bytes), moved_at=now)

    @property
    def report(self) -> RunningUpload:
        """The progress as a message of the agent's report."""
        return RunningUpload(
            rank=self.rank,
            step=self.step,
            object_name=self.name,
            stored_bytes=self.stored_bytes,
            object_bytes=self.object_bytes,
        )

    def stall(self, now: float) -> str:
        """Return a sentence for the user about an upload without progress; empty while the upload makes progress."""
        if now - self.moved_at < STALL_SECONDS:
            return ""
        if self.awaited:
            return (
                f"the upload of step {self.step} of rank {self.rank} has waited {STALL_SECONDS:g} s for "
                f"{self.awaited}, which another rank writes; check the uploads of the other ranks"
            )
        where = f" to {self.name}, {self.stored_bytes:,} of {self.object_bytes:,} bytes stored" if self.name else ""
        return (
            f"the upload of step {self.step} of rank {self.rank} makes no progress for {STALL_SECONDS:g} s{where}; "
            "check the node's connection to S3"
        )
