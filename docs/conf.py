"""The documentation site. `make docs` builds it into build/docs, with warnings as errors.

The source folder is the repository's root, so that links between pages, results and files are the same there and here.
"""

import logging
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # no CUDA toolkit is no news here

project = "megatron_mtraining"
author = "the megatron_mtraining authors"
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/results/*.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "runs",
    "data",
    "wheels",
    "csrc",
    "tests",
    "megatron_mtraining",
    "**/__pycache__",
]

# Raw results have no entry in the navigation: the pages about them link to them. A test keeps docs/ itself complete.
suppress_warnings = ["toc.not_included"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
# What the modules for Megatron-Bridge import; `make setup` installs none of it.
autodoc_mock_imports = ["megatron.bridge", "nemo_run", "transformers"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
maximum_signature_line_length = 100

html_theme = "furo"
html_title = "megatron_mtraining"
html_static_path = ["site/static"]
html_extra_path = ["site/root"]  # index.html of the site: leads to docs/index.html
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
copybutton_prompt_text = "$ "
