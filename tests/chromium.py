"""A page in headless Chromium, driven over its DevTools protocol: what it logs, what it asks for, what it shows."""

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import aiohttp
import pytest

_START_S, _ANSWER_S, _INSTALL_S = 120.0, 120.0, 600.0


def find_chromium() -> str:
    """The browser's program. Debian's package is installed where this process may do so; else the test is skipped."""
    found = shutil.which("chromium")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        with (Path(tempfile.gettempdir()) / "megagrpo_installs_chromium").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # pytest may have several workers
            install = "apt-get install -y --no-install-recommends chromium"
            command = f"command -v chromium || {install} || {{ apt-get update && {install}; }}"
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run(["sh", "-c", command], **quiet, timeout=_INSTALL_S)
        found = shutil.which("chromium")
    if found is None:
        pytest.skip("no Chromium here: `apt-get install chromium`; the test installs it where it is root")
    return found


class BrowserPage:
    """One tab. A context manager; `folder` is the browser's own. Times are not looked at anywhere."""

    def __init__(self, folder: Path, width: int = 1440, height: int = 900):
        self._folder, self._size = folder, f"{width},{height}"
        self.errors: list[str] = []  # exceptions, console errors, refused requests
        self.requests: list[str] = []  # URLs, the page's own too
        self._last = 0

    def __enter__(self) -> "BrowserPage":
        program = find_chromium()
        flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={self._folder}", f"--window-size={self._size}"]
        flags += ["--disable-background-networking", "--disable-component-update"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")
        log = (self._folder.parent / "chromium.log").open("w")
        self._process = subprocess.Popen([program, *flags, "about:blank"], stdout=log, stderr=log)
        self._loop = asyncio.new_event_loop()
        try:
            self._loop.run_until_complete(self._connect())
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info) -> None:
        if hasattr(self, "_http"):
            self._loop.run_until_complete(self._http.close())
        self._process.terminate()
        self._process.wait(30)
        self._loop.close()

    async def _connect(self) -> None:
        port_file, deadline = self._folder / "DevToolsActivePort", time.monotonic() + _START_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert self._process.poll() is None and time.monotonic() < deadline, "Chromium did not start"
            await asyncio.sleep(0.05)
        self._http = aiohttp.ClientSession()
        async with self._http.get(f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}/json") as answer:
            targets = json.loads(await answer.text())
        (url,) = (target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
        self._socket = await self._http.ws_connect(url, max_msg_size=0)

    def call(self, method: str, **params) -> dict:
        """Calls a DevTools method and returns its result; what the page reports meanwhile is kept."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, params), _ANSWER_S))

    async def _call(self, method: str, params: dict) -> dict:
        self._last += 1
        await self._socket.send_json({"id": self._last, "method": method, "params": params})
        while True:
            message = json.loads(await self._socket.receive_str())
            if message.get("id") == self._last:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, event: str, params: dict) -> None:
        match event:
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:1000])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(params["args"])[:1000])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(json.dumps(params["entry"])[:1000])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def open(self, url: str) -> None:
        """Loads a page and waits until its scripts have run."""
        self.call("Page.navigate", url=url)
        self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    def value(self, expression: str):
        """The value of a JavaScript expression in the page; of a promise, what it resolves to."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Waits until a JavaScript expression is true."""
        deadline = time.monotonic() + _ANSWER_S
        while not self.value(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; errors: {self.errors}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Clicks with the mouse in the middle of an element."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{element}.scrollIntoView({{block: 'nearest'}})")
        box = self.value(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({element}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)
