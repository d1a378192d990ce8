"""Take a picture of the page of an artifact, with the given inputs answered.

    python screenshot.py ARTIFACT PICTURE.png "first text" "second text"
    python screenshot.py ARTIFACT PICTURE.png first.png second.png

Needs playwright and a Chromium on the PATH.
"""

from __future__ import annotations

import argparse
import shutil
import sys

from playwright.sync_api import Page, sync_playwright

from retex_hf.demo import launch

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HEIGHT = 800


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        sys.exit(f"No browser was found on the PATH; looked for {', '.join(BROWSERS)}.")
    _, address, _ = launch(options.artifact, title=options.title, prevent_thread_lock=True, quiet=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        scheme = "dark" if options.dark else "light"
        page = browser.new_page(viewport={"width": options.width, "height": HEIGHT}, color_scheme=scheme)
        page.goto(address)
        answer(page, options.inputs)
        if options.overview:
            page.get_by_role("tab", name="Overview").click()
            page.wait_for_selector("#figures .rx")
        page.screenshot(path=options.picture, full_page=True)
        browser.close()


def answer(page: Page, inputs: list[str]) -> None:
    """Enter the inputs and wait for their cards."""
    page.wait_for_selector("#inputs")
    texts = page.locator("#inputs textarea")
    if texts.count():
        texts.fill("\n".join(inputs))
    else:
        page.locator("#inputs input[type=file]").set_input_files(inputs)
        page.wait_for_function("n => document.querySelectorAll('#inputs img').length >= n", arg=len(inputs))
    run = page.locator("#run")
    run.click()
    page.wait_for_function("n => document.querySelectorAll('.rx-card').length === n", arg=len(inputs))
    # The first call prepares experts; show a later one, whose time is typical.
    run.click()
    page.wait_for_function("() => !document.querySelector('.rx-summary').textContent.includes('prepare')")
    page.wait_for_timeout(1000)  # wait for the fade-in


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("artifact", help="folder or Hub id")
    parser.add_argument("picture", help="PNG file to write")
    parser.add_argument("inputs", nargs="+", help="texts, or image files")
    parser.add_argument("--title", help="heading of the page; default: the artifact's name")
    parser.add_argument("--width", type=int, default=1280, help="of the browser window, in pixels")
    parser.add_argument("--dark", action="store_true", help="as people with a dark desktop see it")
    parser.add_argument("--overview", action="store_true", help='show the tab "Overview"')
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
