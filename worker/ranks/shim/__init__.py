"""The shim: one small process per node, which is the parent of all ranks.

The shim continues while the agent restarts, so that it observes every exit of a rank. A rank that starts in a new
interpreter is *cold*. A *warm* rank is forked from the template, a process that has already imported torch.

    agent ── unix socket ──▶ shim (standard library and msgspec; single-threaded)
                              ├── template (has imported torch and others; never runs user code)
                              │     └─ fork ─▶ warm rank, a child of the shim
                              └── fork, exec ─▶ cold rank

The template is a separate process for two reasons. Its imports take seconds and must not delay an exit report. A crash
in an imported library must not affect the parent of the ranks. The template forks twice, so that a rank becomes a child
of the shim, its nearest subreaper. A new rank waits at a gate (a pipe) until the shim has written a record of the rank
to disk. A restarted agent therefore finds every process that runs user code.

Invariant: every process below the shim is the template, a rank with a record, a descendant of such a rank, or about to
be killed. The shim does not interpret jobs, plans or steps. It identifies a rank only by run, generation and rank
number.
"""
