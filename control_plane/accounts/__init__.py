"""The only package that turns causes, facts and decisions into sentences for people.

Invariant: pure. Rewording a sentence here changes no behaviour, because no code reads a sentence.
"""
