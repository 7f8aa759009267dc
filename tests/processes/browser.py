"""A headless Chromium, driven by the DevTools protocol over its WebSocket."""

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count

import aiohttp

PATIENCE_S = 30.0
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--headless=new --no-sandbox --disable-gpu --no-first-run --no-default-browser-check --disable-extensions"
QUIET = "--disable-background-networking --disable-component-update --disable-sync --metrics-recording-only"


class Tab:
    """The one tab of a browser. `problems`: the errors of its console, with uncaught exceptions and the policy's."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future] = {}
        self.problems: list[str] = []
        self.urls: list[str] = []  # of all requests
        self.received_bytes: dict[str, list[int]] = {}  # by path, of each answer
        self._paths: dict[str, str] = {}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            if "id" in message:
                self._waiting.pop(message["id"]).set_result(message)
                continue
            told = message["params"]
            match message["method"]:
                case "Runtime.exceptionThrown":
                    self.problems.append(json.dumps(told["exceptionDetails"]))
                case "Log.entryAdded" if told["entry"]["level"] == "error":
                    self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
                case "Network.requestWillBeSent":
                    url = told["request"]["url"]
                    self.urls.append(url)
                    self._paths[told["requestId"]] = "/" + url.split("/", 3)[3].partition("?")[0]
                case "Network.loadingFinished":
                    path = self._paths.get(told["requestId"], "")
                    self.received_bytes.setdefault(path, []).append(int(told["encodedDataLength"]))

    async def do(self, method: str, **params: object) -> dict:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params}))
        answer = await asyncio.wait_for(self._waiting[number], PATIENCE_S)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    async def run(self, script: str) -> object:
        """The value of an expression in the page."""
        found = await self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def text(self, selector: str = "body") -> str:
        """The text that a reader of the page sees."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def until(self, script: str, within_s: float = PATIENCE_S) -> None:
        """Waits until the expression is true."""
        deadline = time.monotonic() + within_s
        while not await self.run(f"!!({script})"):
            assert time.monotonic() < deadline, f"{script} did not come true; the page shows:\n{await self.text()}"
            await self.run("new Promise(requestAnimationFrame)")

    async def open(self, url: str) -> None:
        """Goes there, and waits until it is loaded."""
        found = await self.do("Page.navigate", url=url)
        assert not found.get("errorText"), found
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def press(self, key: str, code: int, text: str = "") -> None:
        """One key, down and up."""
        told = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        await self.do("Input.dispatchKeyEvent", type="keyDown", text=text, **told)
        await self.do("Input.dispatchKeyEvent", type="keyUp", **told)

    async def look(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """The window's size, and whether the user likes it dark."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.do("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.do("Emulation.setDeviceMetricsOverride", **size)

    async def picture(self) -> bytes:
        """A PNG of what is on the screen."""
        return base64.b64decode((await self.do("Page.captureScreenshot", format="png"))["data"])


@contextlib.contextmanager
def chromium() -> Iterator[str]:
    """A browser without a past. Yields the address of its DevTools."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = [*FLAGS.split(), *QUIET.split(), "--remote-debugging-port=0", f"--user-data-dir={folder}"]
        process = subprocess.Popen([str(CHROMIUM), *options, "about:blank"], stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            said = next((line for line in process.stderr if "DevTools listening" in line), "the browser has ended")
            thread = threading.Thread(target=process.stderr.read)  # or it waits for a reader
            thread.start()
            yield said.split("ws://")[1].split("/")[0]
        finally:
            process.kill()
            process.wait()
            thread.join()


@contextlib.asynccontextmanager
async def tab_of(address: str) -> AsyncIterator[Tab]:
    """The browser's tab."""
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://{address}/json/list") as answer:
            (url,) = [each["webSocketDebuggerUrl"] for each in await answer.json() if each["type"] == "page"]
        async with http.ws_connect(url, max_msg_size=1 << 28) as socket:
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.do(f"{domain}.enable")
            yield tab
