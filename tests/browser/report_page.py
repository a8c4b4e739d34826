"""Selectors of the report's page, and readers of its text."""

from tests.browser.chromium import Page

STEPS = "#test-0 figure[data-kind=steps]"
OPENED = "document.querySelectorAll('details').forEach((part) => { part.open = true; })"
# The plots of the first test.
DRAWN = "document.querySelectorAll('#test-0 figure .uplot').length === 4"


def entry(name: str) -> str:
    """Return the selector of a test whose name contains the text."""
    return f'details.test-entry[data-name*="{name}"]'


def texts(page: Page, selector: str) -> list[str]:
    return page.value(f"[...document.querySelectorAll('{selector}')].map((node) => node.textContent.trim())")
