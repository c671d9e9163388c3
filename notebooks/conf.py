"""Sphinx configuration of the book's site. The notebooks are shown with the outputs they carry; nothing runs."""

import re
from pathlib import Path

from docutils import nodes

HERE = Path(__file__).parent

project = "Gated DeltaNet, proved and running"
author = "gdn_ref authors"
copyright = "gdn_ref authors, MIT licence"

extensions = ["myst_nb", "sphinx_copybutton", "sphinx-mathjax-offline"]
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
suppress_warnings = ["mystnb.unknown_mime_type"]

html_theme = "sphinx_book_theme"
html_title = project
html_theme_options = {
    "show_navbar_depth": 1,
    "home_page_in_toc": True,
    "navbar_persistent": [],  # one search field, in the sidebar
    "use_download_button": False,
    "use_fullscreen_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}  # else the theme reports an invalid mode on the first visit
html_static_path = ["static"]
html_favicon = "static/favicon.svg"  # else a browser asks for one in vain
html_css_files = ["book.css"]
html_copy_source = False
html_show_search_summary = False  # it fetches pages, which a browser refuses for a site opened as files
html_show_sphinx = False
copybutton_selector = "div.cell_input pre, div.highlight-python pre, div.highlight-bash pre"

OWN_ENVIRONMENT = re.compile(r"\\begin\{(align|equation|gather|multline)\*?\}")


def add_contents(app, docname, source):
    """Give index.md its table of contents; the file itself stays plain Markdown that reads the same anywhere."""
    if docname == "index":
        found = sorted(HERE.glob("[0-9][0-9]_*.ipynb")) + sorted(HERE.glob("appendix_*.md"))
        pages = "\n".join(path.stem for path in found)
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def number_equations(app, doctree):
    r"""Wrap each display in equation*: Sphinx would wrap a display with \\ in split, where \tag is an error."""
    for block in doctree.findall(nodes.math_block):
        text = block.astext().strip()
        if not OWN_ENVIRONMENT.match(text):
            text = f"\\begin{{equation*}}\n{text}\n\\end{{equation*}}"
        block.children = [nodes.Text(text)]
        block["nowrap"] = block["no-wrap"] = True


def setup(app):
    """Connect the two functions above."""
    app.connect("source-read", add_contents)
    app.connect("doctree-read", number_equations)
