"""How `make docs` builds the site: Sphinx over these pages, the API from docstrings; nothing is fetched."""

from importlib import metadata

project = "gradaudit"
release = metadata.version("gradaudit")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
root_doc = "docs/index"
# pages link to results and to the repository's own pages, which are in the site as well
include_patterns = ["docs/**.md", "benchmarks/results/**.md", "examples/**.md"]
include_patterns += ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
html_theme = "alabaster"
html_theme_options = {
    "description": "How much private text can be read back from a training update?",
    "fixed_sidebar": True,
    "page_width": "1080px",
}
html_show_sourcelink = False
html_show_copyright = False
suppress_warnings = [
    "myst.header",  # tables of results begin with a second-level heading
    "misc.highlighting_failure",  # TOML blocks with an ellipsis
    "toc.not_included",  # tables of results are reached from the pages that cite them
]
