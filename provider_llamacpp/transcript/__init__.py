"""From the router's transcript to llama-server's request body. Pure: no I/O, no thread.

Provider protocol 8.
"""
