"""Pure decisions of the agent: slots to overwrite, steps to commit, duties of this node in a generation.

The modules of this package do no input or output. The rest of `worker` carries their decisions out.
"""
