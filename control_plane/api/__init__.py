"""The service's network interface: a REST API for people and programs, and a websocket for agents.

Invariant: this package makes every decision that depends on the caller. The packages below it do not use tokens, roles
or HTTP.
"""
