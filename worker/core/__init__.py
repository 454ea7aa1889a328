"""Pure decisions of the agent: which slot to overwrite, which step to commit, and what a node does in a generation.

The modules of this package do no input or output. The other packages of `worker` carry the decisions out.
"""
