"""The shim: one small process per node that is the parent of all ranks.

The shim outlives the agent, so a rank's exit is always observed and never guessed.

    agent ── unix socket ──▶ shim (standard library and msgspec; single-threaded)
                              ├── template (has imported torch and others; never runs user code)
                              │     └─ fork ─▶ warm rank, a child of the shim
                              └── fork, exec ─▶ cold rank

The template is a separate process. Its seconds of imports never delay an exit report, and a crash in an imported
library does not reach the parent of the ranks. The template forks twice, so that a rank becomes a child of the shim,
its nearest subreaper. A rank waits at a gate until its record is on disk. So every process that runs user code is
recorded, and a restarted agent finds it.

Measured on 2 cores (torch 2.13, DeepSpeed 0.19.8): see `template`.

Invariant: every process below the shim is the template, a rank with a record, a descendant of such a rank, or about to
be killed. The shim does not interpret jobs, plans or steps: it only repeats the run, generation and rank of a start.
"""
