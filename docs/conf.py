"""Sphinx: how the pages in this directory become a site. ``make docs`` runs it."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent)]

from provider_llamacpp import __version__  # noqa: E402

project = "provider-llamacpp"
version = release = __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.doctest", "pages"]

# What is not ours has no page here, and looking it up would need the network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!provider_llamacpp\b).*")]
# Streams are made by the functions that return them, not from this.
nitpick_ignore = [("py:class", "provider_llamacpp.calls.Call")]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 72
maximum_signature_line_length = 72
smartquotes = False
doctest_global_setup = "from provider_llamacpp import *"

html_theme = "furo"
html_title = f"provider-llamacpp {version}"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
