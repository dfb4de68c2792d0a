"""The worker beside its peers and its limits, measured in one interleaved run.

``python -m bench`` runs it from a checkout; the package is no part of what gets installed. The
conductor (:mod:`.conductor`) starts three processes for each measurement: a stub llama-server
(:mod:`.stub`), a sink that stands for the engine and its reader (:mod:`.sink`), and between the two
the *driver* that is measured: our worker by its command line, or one of :mod:`.drivers`.

Only ratios within one run mean anything.
"""
