"""The service's network interface: a REST API for people and programs, and a websocket for agents.

Invariant: only this package uses tokens, roles and HTTP, so it makes every decision that depends on the caller.
"""
