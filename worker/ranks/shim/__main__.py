"""Entry point of the shim and, with `--template-fd`, of its template: `python -P -m worker.ranks.shim …`."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

from everstep.host.log_records import TextFormatter


def main() -> None:
    """Run the shim or the template. Always raises SystemExit at its end."""
    parser = argparse.ArgumentParser(prog="python -P -m worker.ranks.shim", description="Parent of a node's ranks.")
    parser.add_argument("--socket", type=Path, help="path of the Unix socket on which the agent connects")
    parser.add_argument("--state-dir", type=Path, help="existing directory in which the shim records its ranks")
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="module to import before ranks start; may be repeated",
    )
    parser.add_argument(
        "--cgroup",
        default="",
        metavar="NAME",
        help="name of the node's cgroup; without a name, ranks run in the cgroup of the shim",
    )
    parser.add_argument("--job-memory-bytes", type=int, help="limit of the memory of a job's ranks together")
    parser.add_argument("--job-task-count", type=int, help="limit of the processes and threads of a job's ranks")
    parser.add_argument("--ready-fd", type=int, help="file descriptor to close when the socket accepts connections")
    parser.add_argument("--template-fd", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(TextFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    # Ranks must not inherit the agent's raised priority.
    os.setpriority(os.PRIO_PROCESS, 0, max(0, os.getpriority(os.PRIO_PROCESS, 0)))
    if arguments.template_fd is not None:
        from worker.ranks.shim.template import run_template

        # This process becomes the template. Ranks, its forks, set up their own logging.
        logging.getLogger().handlers.clear()
        logging.getLogger().setLevel(logging.WARNING)
        run_template(socket.socket(fileno=arguments.template_fd), arguments.preload)
    if arguments.socket is None or arguments.state_dir is None:
        parser.error("--socket and --state-dir are needed")
    from worker.ranks.shim import processes
    from worker.ranks.shim.cgroups import JobLimits
    from worker.ranks.shim.server import Shim, ShimOptions

    processes.close_inherited(keep=[arguments.ready_fd] if arguments.ready_fd is not None else [])
    if arguments.ready_fd is not None:
        os.set_inheritable(arguments.ready_fd, False)  # Ranks must not inherit the pipe that reports "ready".
    options = ShimOptions(
        socket_path=arguments.socket,
        state_dir=arguments.state_dir,
        modules=tuple(arguments.preload),
        ready=arguments.ready_fd,
        cgroup=arguments.cgroup,
        limits=JobLimits(arguments.job_memory_bytes, arguments.job_task_count),
    )
    Shim(options).run()
    raise SystemExit(0)


if __name__ == "__main__":
    main()
