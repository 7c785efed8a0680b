"""How the documentation is built: `make docs`. A warning is an error.

The pages are Markdown (MyST); the reference is read from the docstrings by autodoc. What is in
Python on the pages runs in `make test` (tests/docs), so nothing here may be there for show alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import hoplite_mp  # noqa: E402

project = "hoplite_mp"
author = "the authors of hoplite_mp"
project_copyright = author
release = version = hoplite_mp.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "command_line",
    "config_table",
    "list_examples",
    "list_files",
]
exclude_patterns = ["_build", "_drawings"]
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "py:obj"
highlight_language = "text"  # a drawing is no program

# Only their names are needed, and Ray with torch would be a gigabyte.
autodoc_mock_imports = ["dask", "distributed", "ray", "torch"]
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = False
napoleon_numpy_docstring = True
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"hoplite_mp {release}"
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
