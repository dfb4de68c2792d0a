"""Functions on the bus for what llama-server does beside chat: one small module per group.

Each decodes a payload, asks the server once or twice, and checks the answer. :mod:`.table` lists
them all. Nothing here runs by itself: every request is one that a caller asked for.
"""
