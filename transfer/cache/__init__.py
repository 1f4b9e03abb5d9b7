"""The node cache: one download per node, shared blocks, safe at any crash.

docs/node-cache.md says what is kept where, what holds after a crash, and what must never happen.
"""
