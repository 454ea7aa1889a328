"""Pure decisions of the agent. The modules of this package do no input or output; other packages of `worker` do it."""
