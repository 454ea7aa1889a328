"""The shim: one small process per node that is the parent of all ranks.

The shim outlives the agent, so every exit of a rank is observed, even during a restart of the agent.

    agent ── unix socket ──▶ shim (standard library and msgspec; single-threaded)
                              ├── template (has imported torch and others; never runs user code)
                              │     └─ fork ─▶ warm rank, a child of the shim
                              └── fork, exec ─▶ cold rank

The template is a separate process. Its imports take seconds and do not delay an exit report. A crash in an imported
library does not affect the parent of the ranks. The template forks twice, so that a rank becomes a child of the shim,
its nearest subreaper. A rank waits at a gate until its record is on disk. So every process that runs user code is
recorded, and a restarted agent finds it.

`template` contains measured start times.

Invariant: every process below the shim is the template, a rank with a record, a descendant of such a rank, or about to
be killed. The shim does not interpret jobs, plans or steps. It only identifies a start by run, generation and rank.
"""
