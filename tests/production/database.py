"""PostgreSQL with a synchronous standby, as RDS Multi-AZ has one, for tests of fail-overs.

    first    primary until `promote`, on a unix socket in its own directory
    second   standby until `promote`, then primary

A shell stops both servers and removes their directory at the end of its standard input, also if the test is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psycopg

from tests import programs
from tests.postgresql import account, readable

NAME: Final = "everstep"
_KEEPER: Final = """
trap '' INT TERM
read -r _
for data in "$2"/*/data; do "$1/pg_ctl" -D "$data" -m immediate -w stop >>"$2/log" 2>&1; done
cd / && rm -rf "$2" 2>/dev/null
"""


class Database:
    """A running pair of servers. A context manager that stops both at its end."""

    def __init__(self) -> None:
        owner = account()
        folder = programs.postgresql()
        self._directory = Path(tempfile.mkdtemp(prefix="everstep-pg-"))
        self._programs = readable(folder, self._directory / "programs")
        self._as_owner: dict[str, Any] = {}
        if owner is not None:
            os.chown(self._directory, owner.pw_uid, owner.pw_gid)
            self._as_owner = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        self._keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, "keeper", self._programs, self._directory],
            stdin=subprocess.PIPE,
            start_new_session=True,
            **self._as_owner,
        )
        self._first, self._second = self._directory / "first", self._directory / "second"
        self._primary = self._first
        hosts = f"{self._first},{self._second}"
        self.url = f"postgresql://{NAME}@/{NAME}?host={hosts}&target_session_attrs=read-write"
        """URL that names both servers. libpq connects to the one that accepts writes, which is the primary."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Pid of the primary's main process."""
        return int((self._primary / "data" / "postmaster.pid").read_text().split()[0])

    @property
    def has_standby(self) -> bool:
        """True until `promote` makes the standby the primary."""
        return self._primary == self._first

    def restart(self) -> None:
        """Crash the primary, and start it again."""
        self._control(self._primary, "restart", "-m", "immediate", "-w")

    def promote(self) -> None:
        """Crash the primary for good, and make the standby the primary. A test calls this method at most once."""
        assert self.has_standby
        self._control(self._first, "stop", "-m", "immediate", "-w")
        self._control(self._second, "promote", "-w")
        self._primary = self._second

    def close(self) -> None:
        """Stop both servers and remove their files. Idempotent."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(60)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        for place in (self._first, self._second):
            self._run("mkdir", str(place))
        data = str(self._first / "data")
        self._run("initdb", "-D", data, "--no-sync", "-A", "trust", "-U", NAME, "--encoding=UTF8", "--locale=C.UTF-8")
        self._control(self._first, "start", "-w", *self._options(self._first))
        self._run("createdb", "-h", str(self._first), "-U", NAME, NAME)
        source = f"host={self._first} user={NAME} application_name=standby"
        copied = ("-X", "stream", "-R", "-C", "-S", "standby", "--checkpoint=fast", "--no-sync")
        self._run("pg_basebackup", "-d", source, "-D", str(self._second / "data"), *copied)
        self._control(self._second, "start", "-w", *self._options(self._second))
        with psycopg.connect(f"host={self._first} user={NAME} dbname={NAME}", autocommit=True) as connection:
            # From now on, a commit waits for the standby, so a fail-over loses no confirmed transaction.
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
            connection.execute("SELECT pg_reload_conf()")

    def _options(self, place: Path) -> tuple[str, str]:
        return "-o", f"-k '{place}' -c listen_addresses= -c fsync=off"

    def _control(self, place: Path, *words: str) -> None:
        self._run("pg_ctl", "-D", str(place / "data"), "-l", str(place / "log"), *words)

    def _run(self, program: str, *arguments: str) -> None:
        own = self._programs / program
        log = self._directory / "commands.log"
        # The output goes to a file: the server that pg_ctl starts inherits the output, so `run` would wait for the end
        # of a pipe until that server ends.
        with log.open("ab") as output:
            ended = subprocess.run(
                [own if own.exists() else program, *arguments],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
                timeout=120,
                **self._as_owner,
            )
        assert ended.returncode == 0, f"{program} {arguments}: {log.read_text()[-2000:]}"
