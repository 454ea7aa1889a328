"""The control plane's network interface: a REST API for people and programs, and a websocket for agents.

Invariant: only this package handles tokens, roles and HTTP. Every decision that depends on the caller is made here.
"""
