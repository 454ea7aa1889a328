"""Everything that describes the API, made from its routes and models, so that nothing can say anything else.

Invariant: written by `python -m control_plane.contract` alone; `make check` refuses a tree in which it is not current.
"""
