"""Configure Sphinx. The site is built without a network; `make docs` treats warnings as errors."""

import json
import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parent.parent)]

from furo.navigation import get_navigation_tree  # noqa: E402

import pytorchrl  # noqa: E402 - found through the line above

project = "pytorchrl"
author = "the pytorchrl authors"
project_copyright = "2026, the pytorchrl authors. MIT license."
version = release = pytorchrl.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_nb",
              "sphinx_copybutton", "option_tables", "scores_table", "offline_math", "source_links"]
# The page of a notebook is its copy NAME.ipynb, which has the outputs. Its text NAME.md would have the same name.
NOTEBOOKS = sorted(path.stem for path in Path(__file__).parent.glob("notebooks/*.ipynb"))
# Cells of notebooks with more lines of code are folded; readers open them with a click, without a script.
LONGEST_CODE = 20
exclude_patterns = ["_build", "_ext", *(f"notebooks/{name}.md" for name in NOTEBOOKS),
                    "benchmarks/asynchronous.md", "benchmarks/compile.md", "benchmarks/coverage.md",
                    "benchmarks/defaults.md", "benchmarks/history.md", "benchmarks/lag/*", "benchmarks/one_core.md",
                    "benchmarks/pairs.md",
                    "benchmarks/roofline.md", "benchmarks/scores.md", "benchmarks/scores_short.md",
                    "benchmarks/shelf.md"]

html_theme = "furo"
html_title = f"pytorchrl {release}"
# The sidebar is an overview, so that its entries should fit on a large screen.
_SIDEBAR = {"sidebar-item-spacing-vertical": "0.2rem", "sidebar-caption-space-above": "0.5rem"}
html_theme_options = {"light_css_variables": _SIDEBAR}
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
# The search of the site uses the entries of the general index, which would itself be a page of a thousand lines.
html_use_index = False
html_domain_indices = False

# Text in single backticks in docstrings is shown as code.
default_role = "literal"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
# The nested `Options` classes are excluded, because the options page lists all options.
autodoc_default_options = {"exclude-members": "Options"}
# A reference to a name that the API reference lacks is an error. Exceptions are names of other packages, options (which
# have their own page), the `TypedDict` classes of keywords, type aliases, and names of modules that are not public.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|collections|pathlib|gymnasium|os|threading)\..*|Tensor|Path"),
    ("py:.*", r"([\w.]+\.)?(\w*Keywords|Options|RunFinding|R|T|W)"),
    ("py:.*", r"pytorchrl\.(runtime\.journal|support|"
              r"scheme\.(counters|gradients\.process_group|options|replay\.shard_states|timing|transport\.encoder))\..*"),
    ("py:.*", "Acting|AnyEnv|CollectorSetup|CWorkerRecipe|Compression|Context|Destination|Forwarded|GradientKind|"
              "GWorkerRecipe|Inference|Json|KeptEnvs|Numerics|OptionValue|RawSpaces|RecordWriter|RowName|RunRecord|"
              "RunState|RuntimeKind|Section|Trial|UpdateStrategy|UserPart|Wanted|[CGR]WorkerSetFactory|"
              "(Actor|Algorithm|Part|(Shard)?Storage)Factory"),
]
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Formulas are MathML, so that the site shows them without a network.
html_math_renderer = "offline_math"
# Copy buttons leave out prompts and outputs.
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

nb_execution_mode = "off"
nb_render_markdown_format = "myst"  # the default shows tables as text
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"


def literal_blocks(app, what, name, obj, options, lines):
    """Show indented blocks of docstrings as code, without changes; leave sections such as `Args:` to napoleon."""
    found, above = [], ""
    for number, line in enumerate(lines):
        begins = line.startswith("    ") and number > 0 and not lines[number - 1].strip()
        if begins and not above.startswith(" ") and not re.fullmatch(r"[A-Z]\w*:|", above):
            found += ["::", ""]
        if line.strip():
            above = line
        found.append(line)
    lines[:] = found


_attribute_docstrings = {}


def save_attribute_docstring(app, what, name, obj, options, lines):
    """Save the docstring of an attribute, because napoleon would read the text before a colon as a type."""
    if what in ("attribute", "data", "property"):
        _attribute_docstrings[name] = list(lines)


def restore_attribute_docstring(app, what, name, obj, options, lines):
    """Restore the saved docstring of an attribute after napoleon."""
    if name in _attribute_docstrings:
        lines[:] = _attribute_docstrings.pop(name)


def present_notebook(app, docname, source):
    """Add buttons that download the files of a notebook below the title of its page, and fold long code."""
    name = docname.removeprefix("notebooks/")
    if docname == f"notebooks/{name}" and name in NOTEBOOKS:
        notebook = json.loads(source[0])
        title, _, text = "".join(notebook["cells"][0]["source"]).partition("\n")
        buttons = f"{{download}}`Notebook <{name}.ipynb>`"
        if (Path(__file__).parent / "notebooks" / f"{name}.json").exists():
            buttons += f" {{download}}`Results <{name}.json>`"
        notebook["cells"][0]["source"] = f"{title}\n\n{buttons}\n{text}"
        for cell in notebook["cells"]:
            tags = cell["metadata"].setdefault("tags", [])
            if cell["cell_type"] == "code" and len("".join(cell["source"]).splitlines()) > LONGEST_CODE:
                tags += ["hide-input"] * ("hide-input" not in tags)
        source[0] = json.dumps(notebook)


def shorten_sidebar(app, pagename, templatename, context, doctree):
    """Show the pages below a page in the sidebar only on that page, and on the pages below it."""
    if "toctree" in context:
        tree = context["toctree"](collapse=True, titles_only=True, maxdepth=-1, includehidden=True)
        context["furo_navigation_tree"] = get_navigation_tree(tree)


def setup(app):
    """Register the functions above. Napoleon, which docstrings pass, has the priority 500."""
    app.connect("source-read", present_notebook)
    app.connect("html-page-context", shorten_sidebar, priority=900)  # after the theme, which shows all pages
    app.connect("autodoc-process-docstring", literal_blocks, priority=400)
    app.connect("autodoc-process-docstring", save_attribute_docstring, priority=450)
    app.connect("autodoc-process-docstring", restore_attribute_docstring, priority=550)
