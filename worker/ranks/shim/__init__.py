"""The shim: one small process per node, which is the parent of all ranks and outlives the agent.

    agent ── unix socket ──▶ shim (standard library and msgspec; single-threaded)
                              ├── template (has imported torch and others; never runs user code)
                              │     └─ fork ─▶ warm rank, a child of the shim
                              └── fork, exec ─▶ cold rank

The template is a separate process, because its imports take seconds and may crash. It forks twice, so that a rank
becomes a child of the shim, its nearest subreaper. A new rank waits at a gate (a pipe) until its record is on disk, so
a restarted agent finds every process that runs user code.

Invariant: every process below the shim is the template, a rank with a record, a descendant of such a rank, or about to
be killed. The shim does not interpret jobs, plans or steps.
"""
