"""The calls that a vLLM server answers during an update, over real HTTP: it notes them, and what it has loaded.

It joins as vLLM's only rank does, keeps what it has fetched when it is told to load, and says by an error what is not
so when it is asked: so does our rank.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tensorhub
from tensorhub.integrations.vllm_engines import NOTHING
from tensorhub.integrations.whole import Whole


class StandIn:
    """A server at `url`; `calls` are (path, body)."""

    def __init__(self):
        self.calls, self.loaded, self._whole, self._version = [], {}, None, NOTHING
        self._is_updating = False
        self._next = None  # fetched, and to be loaded
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                path = self.path.split("?")[0]
                ours.calls.append((path, body))
                try:
                    ours.check(path)
                    ours.carry_out(path, body)
                    ours.note(path)
                    self.send_response(200)
                except tensorhub.TensorHubError as error:
                    ours.note_failure(path)
                    self.send_response(500, str(error))
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def check(self, path):
        """As vLLM does."""
        if path in ("/start_weight_update", "/shutdown_weight_transfer_engine") and self._is_updating:
            raise tensorhub.UsageError("an update is already active")
        if path in ("/update_weights", "/finish_weight_update") and not self._is_updating:
            raise tensorhub.UsageError("no update is active")

    def note(self, path):
        """It was carried out."""
        if path in ("/start_weight_update", "/finish_weight_update"):
            self._is_updating = path == "/start_weight_update"

    def note_failure(self, path):
        """It could not be. As vLLM 0.32 does, that ends an update whose weights were not taken in, and no other."""
        if path == "/update_weights":
            self._is_updating = False

    def carry_out(self, path, body):
        if path == "/init_weight_transfer_engine":
            self.init(body["init_info"])
        elif path == "/update_weights":
            self._next, wanted = None, body["update_info"]["version"]
            self._next = self.fetch(wanted) if wanted is not None else None
        elif path == "/finish_weight_update":
            wanted, self._next = self._next, None
            if wanted is not None:
                self.loaded, self._version = {name: tensor.clone() for name, tensor in self._whole}, wanted
        elif path == "/shutdown_weight_transfer_engine":
            self._whole.close(timeout=5)

    def fetch(self, version):
        """The version that there is to load then, None for none."""
        return self._whole.update(version)

    def init(self, info):
        if self._whole is None:
            self._whole = Whole(info["model"], replica=info["replica"], **info["options"])
        if info.get("loaded") is None and info.get("kept") is None:
            self._whole.join(timeout=info.get("timeout"))
        for asked in ("loaded", "kept"):
            if info.get(asked) not in (None, self._version):
                raise tensorhub.VersionUnavailable(f"it is {self._version}")

    def close(self):
        if self._whole is not None:
            self._whole.close(timeout=5)
        self._server.shutdown()
        self._server.server_close()
