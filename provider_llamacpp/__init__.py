"""llama.cpp behind the iii engine: a small, threaded provider worker."""

from ._version import VERSION as __version__

__all__ = ["__version__"]
