"""The site as a reader sees it: every page, in light and in dark, in headless Chromium, without a network.

Built from the committed outputs, served on this machine, and opened as files too, as `make book` says at its end.
Skipped, and says so, where there is no browser.
"""

import contextlib
import functools
import http.server
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["index", *sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
MATH_IS_SET = "() => [...document.querySelectorAll('.math')].every(m => m.querySelector('mjx-container'))"
BARE_TEXT = """() => {
    const page = document.querySelector('article').cloneNode(true);
    page.querySelectorAll('pre, code, mjx-container, script').forEach(node => node.remove());
    return page.textContent;
}"""
BROKEN_IMAGES = "() => [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
# What displays' boxes do not show: where a display is wider than its box, and where it begins left of it, out of reach.
DISPLAYS = """() => [...document.querySelectorAll('article div.math')].map(box => {
    const [inner, outer] = [box.querySelector('mjx-container'), box].map(x => x.getBoundingClientRect());
    return [box.textContent.trim().slice(0, 40), inner.width - outer.width, outer.left - inner.left];
}).filter(([, wider, before]) => """
TOO_WIDE, OUT_OF_REACH = DISPLAYS + "wider > 1)", DISPLAYS + "before > 1)"
FITS = "() => document.documentElement.scrollWidth <= window.innerWidth"
BRIGHTNESS = """() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx", reason="no Sphinx: the site's pages are not tested")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "notebooks" / "build.py"), "--site-only", "--out", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A file server that keeps its log to itself."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served; a port that was free."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with contextlib.closing(server.socket):
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: the site's pages are not tested")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed: the site's pages are not tested")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield chromium
        chromium.close()


class Visit:
    """One page opened in a fresh window, with what it complained of and what it asked for outside the site."""

    def __init__(self, browser, url, **window):
        self.complaints, self.outside = [], []
        self.context = browser.new_context(**window)
        self.page = self.context.new_page()
        self.page.on("console", lambda m: m.type == "error" and self.complaints.append(m.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda request: self.complaints.append(f"missing: {request.url}"))
        self.page.on("request", self.note)
        self.page.goto(url, wait_until="load")
        self.page.wait_for_function(MATH_IS_SET, timeout=30_000)

    def note(self, request):
        if not request.url.startswith(("http://127.0.0.1:", "file:", "data:", "blob:")):
            self.outside.append(request.url)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()


def test_there_are_chapters_to_look_at():
    assert len(PAGES) >= 8


def test_every_chapter_has_its_page(site):
    assert [name for name in PAGES if not (site / f"{name}.html").is_file()] == []


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_page(address, browser, name, mode):
    window = {"color_scheme": mode, "viewport": {"width": 1280, "height": 900}}
    with Visit(browser, f"{address}/{name}.html", **window) as visit:
        page = visit.page
        assert visit.complaints == []
        assert visit.outside == []
        assert page.locator("mjx-container").count() > 0
        assert page.locator("mjx-merror").count() == 0
        assert page.evaluate(BROKEN_IMAGES) == []
        bare = page.evaluate(BARE_TEXT)
        assert "\\tag" not in bare and "$" not in bare and "\\begin" not in bare
        assert page.locator("html").get_attribute("data-theme") == mode
        assert (sum(page.evaluate(BRIGHTNESS)) > 3 * 128) == (mode == "light")
        assert page.evaluate(FITS)
        assert page.evaluate(TOO_WIDE) == []
        page.set_viewport_size({"width": 1000, "height": 900})  # a column of 736 pixels
        assert page.evaluate(TOO_WIDE) == []
        page.set_viewport_size({"width": 390, "height": 844})  # a telephone
        assert page.evaluate(FITS)
        assert page.evaluate(OUT_OF_REACH) == []


@pytest.mark.parametrize("name", PAGES[1:])
def test_chapter_shows_its_figures_and_folds_its_answers(address, browser, name):
    with Visit(browser, f"{address}/{name}.html") as visit:
        page = visit.page
        assert page.locator("article img").count() > 0
        assert page.locator("article details summary").count() > 0
        assert page.locator("article details[open]").count() == 0
        page.locator("article details summary").first.click()
        assert page.locator("article details[open]").count() == 1


def test_previous_and_next_lead_through_the_book(address, browser):
    with Visit(browser, f"{address}/index.html") as visit:
        for name in PAGES[1:]:
            visit.page.locator("a.right-next").click()
            assert visit.page.url.endswith(f"{name}.html")
        assert visit.complaints == []


def test_search_finds_a_chapter(address, browser):
    with Visit(browser, f"{address}/search.html?q=overflows") as visit:
        visit.page.wait_for_selector('#search-results a[href*="07_range_and_precision.html"]', timeout=30_000)
        assert visit.complaints == []
        assert visit.outside == []


@pytest.mark.parametrize("name", PAGES[:2])
def test_page_opened_as_a_file(site, browser, name):
    with Visit(browser, (site / f"{name}.html").as_uri()) as visit:
        assert visit.page.locator("mjx-merror").count() == 0
        assert visit.page.evaluate(BROKEN_IMAGES) == []
        assert visit.outside == []
