"""How an engine of vLLM is told what its ranks shall do: a `vllm.LLM` of this process, or a server over HTTP.

Each call returns when all ranks have done it, or raises: what is behind it is `vllm_worker`.
"""

import json
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import tensorhub

WAIT_S = 300.0
NOTHING = -1  # no version: those begin at 0


class NotDone(tensorhub.Unavailable):
    """The engine has answered, and not done what it was told."""


class Engine:
    """One engine with all of its ranks.

    vLLM refuses to begin an update, and to let its ranks leave, before the update before has been finished.
    """

    def __init__(self) -> None:
        self._is_begun = False  # an update

    def fetch(self, version: int, timeout: float) -> None:
        """As far as that can be done while the engine computes: of a new update, or of one that came to nothing."""
        if not self._is_begun:
            self.start()
            self._is_begun = True
        try:
            self.update(timeout, version=version, timeout=timeout)
        except NotDone:  # then vLLM ends it
            self._is_begun = False
            raise

    def load(self, wait_s: float = WAIT_S) -> None:
        """What was fetched (in place it is read now), which ends the update; the engine computes nothing meanwhile."""
        self.finish(wait_s)
        self._is_begun = False

    def leave(self) -> None:
        """The ranks are no replicas any more. An update that came to nothing is ended, and nothing is loaded."""
        if self._is_begun:
            self.update(WAIT_S, version=None)
            self.finish(WAIT_S)
            self._is_begun = False
        self.shut_down()

    # --- as vLLM is told, in one way or the other ---------------------------------------------------------------------

    def init(self, init_info: dict[str, Any]) -> None:
        """The ranks join, and answer, as `vllm_worker.InitInfo` says. Raises if one cannot, or if it is not so."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin an update on all ranks."""
        raise NotImplementedError

    def update(self, wait_s: float, **info: object) -> None:
        """Tell all ranks what to fetch. Raises `NotDone` if one of them could not take that in."""
        raise NotImplementedError

    def finish(self, wait_s: float) -> None:
        """Load what was fetched, if all ranks have something to load."""
        raise NotImplementedError

    def go_on(self, version: str) -> None:
        """Compute with that version, and with nothing that was computed with another."""
        raise NotImplementedError

    def resume(self) -> None:
        """Compute on with what there was: nothing has been loaded."""
        raise NotImplementedError

    def shut_down(self) -> None:
        """Tell all ranks to leave."""
        raise NotImplementedError


def engine_of(given: Any) -> Engine:
    """A `vllm.LLM`, or the address of a server."""
    return Server(given) if isinstance(given, str) else Offline(given)


class Offline(Engine):
    """A `vllm.LLM` of this process. Nobody else drives it while it is updated, so nothing needs to be paused."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self._llm = llm

    def init(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start(self) -> None:
        self._llm.start_weight_update()

    def update(self, wait_s: float, **info: object) -> None:
        try:
            self._llm.update_weights({"update_info": info})
        except Exception as error:
            raise NotDone(f"the engine could not take in {info}: {error}") from error

    def finish(self, wait_s: float) -> None:
        self._llm.finish_weight_update()

    def go_on(self, version: str) -> None:
        self._llm.update_weight_version(version)
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.llm_engine.reset_encoder_cache()

    def resume(self) -> None:
        pass  # it was never paused

    def shut_down(self) -> None:
        self._llm.collective_rpc("shutdown_weight_transfer_engine")


class Server(Engine):
    """A server of vLLM, over HTTP."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url.rstrip("/")

    def init(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", init_info.get("timeout") or WAIT_S, init_info=init_info)

    def start(self) -> None:
        self._post("/start_weight_update")

    def update(self, wait_s: float, **info: object) -> None:
        self._post("/update_weights", wait_s, update_info=info)

    def load(self, wait_s: float = WAIT_S) -> None:
        self._post("/pause?mode=keep&clear_cache=true")  # prefix cache and all else that old weights have computed
        super().load(wait_s)

    def finish(self, wait_s: float) -> None:
        self._post("/finish_weight_update", wait_s)

    def go_on(self, version: str) -> None:
        self._post("/update_weight_version", new_version=version)
        self.resume()  # not after an error: who is paused answers nothing

    def resume(self) -> None:
        self._post("/resume")

    def shut_down(self) -> None:
        self._post("/shutdown_weight_transfer_engine")

    def _post(self, path: str, wait_s: float = WAIT_S, **body: Any) -> None:
        headers = {"Content-Type": "application/json"}
        self._ask(Request(self._url + path, json.dumps(body).encode(), headers), wait_s + 30.0)

    def _ask(self, request: Request, wait_s: float) -> None:
        hint = "is VLLM_SERVER_DEV_MODE=1 set, and what does its log say?"
        try:
            with urlopen(request, timeout=wait_s) as answer:
                answer.read()
        except HTTPError as error:
            text = f"{error.url}: {error.code} {error.read(2000).decode(errors='replace')}"
            raise NotDone(text, hint=hint) from error
        except OSError as error:
            raise tensorhub.Unavailable(f"{self._url}: {error}", hint=hint) from error
