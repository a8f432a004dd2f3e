"""The picture of the README: the page that `explain --html` writes of the demo, for an H200.

    python -m tests.support.picture

Needs Chromium and playwright, as `tests/report/test_html.py` does.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

import tvm_fusion
from tvm_fusion.demo import demo_module
from tvm_fusion.report.html.write import write_html

from .tools import require

PICTURE = Path(__file__).parents[2] / "tutorials" / "images" / "report.png"
SIZE = {"width": 1280, "height": 640}


def main() -> None:
    report = tvm_fusion.explain(demo_module("cuda"), "nvidia_h200").to_json(sources=True)
    with TemporaryDirectory() as folder, sync_playwright() as running:
        page = Path(folder) / "report.html"
        write_html(report, page)
        browser = running.chromium.launch(
            executable_path=require("chromium"), args=["--no-sandbox"]
        )
        window = browser.new_page(viewport=SIZE)
        window.goto(page.as_uri())
        window.locator("figure svg").last.wait_for(state="attached")
        window.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
