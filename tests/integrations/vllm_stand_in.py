"""The calls that a vLLM server answers during an update, over real HTTP: it notes them, and what could be read then."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tensorhub


class StandIn:
    """A server at `url`; `calls` are (path, body)."""

    def __init__(self, address):
        self.calls, self.loaded = [], {}
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                path = self.path.split("?")[0]
                ours.calls.append((path, body))
                if path == "/update_weights":
                    version = body["update_info"]["version"]
                    ours.loaded = tensorhub.load(f"policy@{version}", server=address)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
