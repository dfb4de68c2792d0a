"""The bus: one connection to the engine, and the channels of the streams.

Engine protocol. Nothing here knows HTTP, llama-server or the router.
"""
