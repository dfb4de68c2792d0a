"""llama-server: how it is reached, what it serves, what it counts and embeds.

Nothing here knows the bus.
"""
