"""The calls that a vLLM server answers during an update, over real HTTP: it notes them, and what it has loaded.

It joins as vLLM's only rank does, and keeps what it has fetched when it is told to load.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tensorhub.integrations.whole import Whole


class StandIn:
    """A server at `url`; `calls` are (path, body)."""

    def __init__(self):
        self.calls, self.loaded, self._whole = [], {}, None
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                path = self.path.split("?")[0]
                ours.calls.append((path, body))
                ours.carry_out(path, body)
                self.send_response(200)
                self.end_headers()

            def do_GET(self):
                assert self.path == "/get_world_size?include_dp=false"
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'{"world_size": 1}')

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def carry_out(self, path, body):
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            self._whole = Whole(info["model"], replica=info["replica"], **info["options"])
        elif path == "/update_weights":
            self._whole.update(body["update_info"]["version"])
        elif path == "/finish_weight_update":
            self.loaded = {name: tensor.clone() for name, tensor in self._whole}
        elif path == "/shutdown_weight_transfer_engine":
            self._whole.close(timeout=5)

    def close(self):
        if self._whole is not None:
            self._whole.close(timeout=5)
        self._server.shutdown()
        self._server.server_close()
