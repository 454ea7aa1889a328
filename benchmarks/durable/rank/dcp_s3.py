"""A storage writer for torch.distributed.checkpoint (DCP) that sends each file to S3 with boto3. DCP has none."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase

BUCKET = "bench"


@cache
def client() -> Any:
    """Return this process's boto3 client."""
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(s3={"addressing_style": "path"}, proxies={}))


class _Object(io.BytesIO):
    """A file in memory. DCP closes it before its content is sent, so `close` has no effect."""

    def close(self) -> None:
        """Do nothing."""


class S3Files(FileSystemBase):
    """DCP's file operations on objects in S3. A path is an object's key."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], _: str) -> Generator[io.IOBase, None, None]:
        file = _Object()
        yield file
        file.seek(0)
        client().upload_fileobj(file, BUCKET, str(path))

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        s3 = client()
        s3.copy_object(Bucket=BUCKET, Key=str(new_path), CopySource={"Bucket": BUCKET, "Key": str(path)})
        s3.delete_object(Bucket=BUCKET, Key=str(path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing, because S3 has no folders."""

    @classmethod
    def validate_checkpoint_id(cls, _: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return bool(client().list_objects_v2(Bucket=BUCKET, Prefix=str(path)).get("KeyCount"))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        client().delete_object(Bucket=BUCKET, Key=str(path))

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        found = client().list_objects_v2(Bucket=BUCKET, Prefix=f"{path}/").get("Contents", ())
        return [each["Key"] for each in found]


class S3Writer(FileSystemWriter):
    """DCP's own writer, with keys below `prefix` in S3 in place of files."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix, sync_files=False)
        self.fs = S3Files()
        self.path = prefix

    def remove(self) -> None:
        """Delete all objects of the checkpoint."""
        for key in self.fs.ls(self.path):
            self.fs.rm_file(key)
