"""Sphinx: the pages of this folder, and the API from its docstrings. ``make docs``."""

project = "deepsp"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "deepsp"

myst_heading_anchors = 3
# Of links to results and sources, which lie beside this folder; a test checks all links.
suppress_warnings = ["myst.xref_missing"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["deepspeed"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
