"""The Sphinx configuration of the documentation: ./dev docs."""

from __future__ import annotations

project = "pytest-aorta"
copyright = "the pytest-aorta contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
nitpicky = True
# The API page leaves out classes that tests and workloads do not use. The site has no inventory of other projects.
nitpick_ignore = [
    ("py:class", name)
    for name in (
        "pytest_aorta.plan.accelerators.Reading",
        "pytest_aorta.plan.launch_plan.StepRecording",
        "pytest_aorta.result.outcome.EndReason",
        "pytest_aorta.result.series.LocalWeights",
        "pytest_aorta.plan.device_kind.Backend",
        "pytest_aorta.plan.device_kind.DeviceKind",
        "pytest_aorta.plan.options.LauncherKind",
        "pytest_aorta.verdict.metrics.Tolerance",
        "pytest_aorta.verdict.metrics.Value",
        "pytest_aorta.verdict.verdicts.State",
        "pytest_aorta.verdict.verdicts.VerdictReference",
        "collections.abc.Callable",
        "collections.abc.Mapping",
        "collections.abc.Sequence",
        "torch.Tensor",
    )
]
exclude_patterns = ["_build"]

# Links may point to headings down to the third level, as on code hosts.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# The API page shows the types in signatures only.
autodoc_member_order = "bysource"
autodoc_typehints = "none"
# A default such as os.environ would otherwise be shown with its value on the machine that builds the site.
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

copybutton_prompt_text = "$ "  # of a block with prompts, the commands alone are copied
smartquotes = False  # quotes are of code, such as 'all'
highlight_language = "none"  # a block without a language is output
html_theme = "furo"  # light or dark, as the reader's system is set
html_title = "pytest-aorta"
html_static_path = ["_static"]
html_css_files = ["tables.css"]  # tables and samples fit into wide and narrow windows
html_copy_source = False
html_show_sourcelink = False
