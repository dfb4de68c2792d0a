"""A whole stack on one machine: loopback engine, minimal router, llama-server, demo model.

For trying the worker, for embedding it and for its tests. It is not a deployment: it listens on
the loopback interface only, keeps everything in memory and knows one user. Production runs on the
iii engine with its own router. Needs the extra ``local``; only the commands and tests that use it
import it.
"""
