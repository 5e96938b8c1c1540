"""A notebook in a real JupyterLab or Notebook 7, in headless Chromium without any internet.

For benchmarks and tests of what a user sees: write cells, run them, look at the page. Every host name but loopback is
unresolvable, so a page that needs a CDN shows up in `failed_requests`. Needs playwright, jupyterlab, notebook and a
Chromium (PRL_CHROMIUM, else the one on PATH).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import nbformat
from playwright.sync_api import Browser, Page, sync_playwright

App = Literal["lab", "notebook"]

OFFLINE = ("--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
KERNEL = "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel"
READY = f"""() => window.jupyterapp?.shell?.currentWidget?.context?.isReady && {KERNEL}?.status === 'idle'
    && ['notebook:run-all-cells', 'apputils:change-theme'].every(c => window.jupyterapp.commands.hasCommand(c))"""
OUTPUTS = "[...document.querySelectorAll('.jp-OutputArea-output')]"
CELLS = "[...window.jupyterapp.shell.currentWidget.content.model.cells]"
ERROR = f"{CELLS}.flatMap(c => c.outputs?.toJSON() ?? []).find(o => o.output_type === 'error')"
POLL_MS = 200
START_SECONDS = 300
"""Patience with servers and pages on a machine that is busy otherwise."""


@dataclass
class NotebookPage:
    """An open notebook with a running kernel."""

    page: Page
    path: Path
    errors: list[str] = field(default_factory=list)
    """console errors and uncaught exceptions since the notebook was ready"""
    failed_requests: list[str] = field(default_factory=list)
    """address and reason; not those the page itself gave up, as it does with fonts when the theme changes"""
    messages: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, bytes) of every message the page received over the kernel's web socket"""

    def run_all(self) -> None:
        """Start all cells; returns at once."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")

    def wait_idle(self, seconds: float = 120) -> None:
        """Until the kernel has nothing to do.

        Raises:
            playwright.sync_api.TimeoutError: it still has after `seconds`.
        """
        self.page.wait_for_function(f"() => {KERNEL}?.status === 'idle'", timeout=1000 * seconds)

    def wait_text(self, text: str, seconds: float = 120) -> None:
        """Until an output contains `text`.

        Raises:
            RuntimeError: a cell failed; with its traceback.
            playwright.sync_api.TimeoutError: no output contains it after `seconds`.
        """
        self._wait(f"text => {OUTPUTS}.some(e => e.innerText.includes(text)) || {ERROR}", seconds, text)

    def wait_done(self, seconds: float = 120) -> None:
        """Until every cell has run. Looks at the notebook and not at the page, so it costs the browser nothing.

        Raises:
            RuntimeError: a cell failed; with its traceback.
            playwright.sync_api.TimeoutError: some have not after `seconds`.
        """
        self._wait(f"() => {CELLS}.every(c => c.executionCount !== null) || {ERROR}", seconds)

    def _wait(self, condition: str, seconds: float, argument: Any = None) -> None:
        # Not at every frame, as is Playwright's default: reading a page's text makes the browser lay it out.
        found = self.page.wait_for_function(condition, arg=argument, timeout=1000 * seconds, polling=POLL_MS)
        if (error := found.json_value()) is not True:
            trace = re.sub("\x1b\\[[0-9;]*m", "", "\n".join(error["traceback"]))
            raise RuntimeError(f"a cell failed:\n{trace}")

    def outputs(self) -> str:
        """Text of all outputs."""
        return self.page.evaluate(f"() => {OUTPUTS}.map(e => e.innerText).join('\\n')")

    def theme(self, name: Literal["Light", "Dark"]) -> None:
        """Switch the application's theme."""
        change = "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})"
        self.page.evaluate(change, f"JupyterLab {name}")
        light = "true" if name == "Light" else "false"
        self.page.wait_for_selector(f"body[data-jp-theme-light={light}]", state="attached")

    def save(self) -> Path:
        """Save the notebook as a user would; returns its path."""
        self.page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
        self.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
        return self.path


class Jupyter:
    """A browser, and a server for each application that is used; notebooks are opened one after the other."""

    def __init__(self, root: Path, python_path: Sequence[Path], browser: Browser, stack: ExitStack) -> None:
        self._root, self._python_path, self._browser, self._stack = root, python_path, browser, stack
        self._servers: dict[App, tuple[str, str]] = {}

    def _serve(self, app: App) -> tuple[str, str]:
        # Not one server for both: jupyter_server caches static files by name alone, and then refuses (403) a font that
        # lies in the folders of both.
        if app not in self._servers:
            (self._root / app).mkdir()
            self._servers[app] = self._stack.enter_context(_server(self._root / app, self._python_path))
        return self._servers[app]

    @contextmanager
    def open(self, cells: Sequence[str], app: App = "lab", height: int = 1100) -> Iterator[NotebookPage]:
        """Write a notebook of code cells and open it; its kernel is ended afterwards."""
        url, token = self._serve(app)
        path = self._root / app / f"nb_{secrets.token_hex(4)}.ipynb"
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells], metadata=kernel)
        nbformat.write(notebook, path)
        page = self._browser.new_page(viewport={"width": 1280, "height": height})
        page.set_default_timeout(1000 * START_SECONDS)
        opened = NotebookPage(page, path)
        _listen(opened)
        folder = "doc/tree" if app == "lab" else "notebooks"
        page.goto(f"{url}/{folder}/{path.name}?reset&token={token}")
        page.wait_for_function(READY, timeout=1000 * START_SECONDS)
        opened.errors.clear()  # Notebook 7.6 throws one of its own while it loads
        try:
            yield opened
        finally:
            opened.theme("Light")  # the server remembers it
            page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
            page.close()


def _listen(opened: NotebookPage) -> None:
    def failed(request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":
            opened.failed_requests.append(f"{request.url} {request.failure}")

    def received(frame: Any) -> None:
        opened.messages.append((time.perf_counter(), len(frame)))

    page = opened.page
    page.on("console", lambda m: opened.errors.append(f"{m.text} {m.location['url']}") if m.type == "error" else None)
    page.on("pageerror", lambda e: opened.errors.append(str(e)))
    page.on("requestfailed", failed)
    page.on("websocket", lambda socket: socket.on("framereceived", received))


@contextmanager
def jupyter(root: Path, python_path: Sequence[Path] = ()) -> Iterator[Jupyter]:
    """Start the browser, ready to serve notebooks below `root` on loopback; kernels import from `python_path` first.

    Raises:
        FileNotFoundError: no Chromium.
        RuntimeError: the server did not start; its log is in the message.
    """
    chromium = os.environ.get("PRL_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise FileNotFoundError("no Chromium found: install it (Debian: apt-get install chromium) or set PRL_CHROMIUM")
    with ExitStack() as stack, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=[*OFFLINE, *QUIET])
        try:
            yield Jupyter(root, python_path, browser, stack)
        finally:
            browser.close()


@contextmanager
def _server(root: Path, python_path: Sequence[Path]) -> Iterator[tuple[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token, log = secrets.token_hex(16), root / "jupyter.log"
    own = {name: str(root / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    _configure(Path(own["JUPYTER_CONFIG_DIR"]))
    path = os.pathsep.join([*map(str, python_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": root,
        "IdentityProvider.token": token,
        "LabApp.expose_app_in_browser": True,
        "JupyterNotebookApp.expose_app_in_browser": True,
    }
    command = [sys.executable, "-P", "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            env={**os.environ, **own, "PYTHONPATH": path},
            cwd=root,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_up(f"http://127.0.0.1:{port}/api", server, log)
        yield f"http://127.0.0.1:{port}", token
    finally:
        server.send_signal(signal.SIGTERM)  # ends the kernels as well
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _configure(config: Path) -> None:
    """No question about news over the page, and cells stay in the page when they are scrolled out of sight."""
    overrides = {
        "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},
        "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    }
    (config / "labconfig").mkdir(parents=True)
    (config / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(overrides))


def _wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    raise RuntimeError(f"the Jupyter server did not start:\n{log.read_text()[-3000:]}")
