"""The agent process of a node, and its connection to the control plane.

The agent executes the commands of the control plane, sends reports, and stores its own log and the node's promise. The
promise is the highest generation that the node has agreed to join.
"""
