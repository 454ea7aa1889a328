"""The shim: one small process per node, parent of all ranks.

It outlives the agent, so a rank's exit is always seen and never guessed.

    agent ── unix socket ──▶ shim (standard library and msgspec; single-threaded)
                              ├── template (torch and friends imported; never runs user code)
                              │     └─ fork ─▶ warm rank, handed over to the shim
                              └── fork, exec ─▶ cold rank

The template is a process of its own: seconds of imports never delay an exit report, and what the imports may do
(memory, a crash in a library) does not happen to the parent of the ranks. It forks twice, so that a rank becomes the
child of the shim, its nearest subreaper. A rank stands at a gate until its record is on disk; so no process runs user
code that a restarted agent would not find.

Measured on 2 cores (torch 2.13, DeepSpeed 0.19.8): see `template`.

Invariant: every process below the shim is the template, a rank with a record, a descendant of one, or about to be
killed. The shim knows no jobs, plans or steps: whose rank it is are three values that it repeats.
"""
