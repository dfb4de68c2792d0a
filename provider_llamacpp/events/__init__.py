"""From the bytes of llama-server's stream to the frames of the caller. Pure: no I/O, no thread.

Provider protocol 6.
"""
