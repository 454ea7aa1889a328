"""The service's surface: REST for people and programs, one websocket for agents.

Invariant: everything that depends on the caller is decided here; nothing below knows tokens, roles or HTTP.
"""
