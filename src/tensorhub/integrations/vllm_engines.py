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

    def init(self, init_info: dict[str, Any]) -> None:
        """The ranks join, and answer, as `vllm_worker.InitInfo` says. Raises if one cannot, or if it is not so."""
        self._tell("init_weight_transfer_engine", init_info.get("timeout") or WAIT_S, init_info=init_info)

    def fetch(self, version: int, timeout: float) -> None:
        """As far as that can be done while the engine computes: of a new update, or of one that came to nothing."""
        if not self._is_begun:
            self._tell("start_weight_update")
            self._is_begun = True
        try:
            self._tell("update_weights", timeout, update_info={"version": version, "timeout": timeout})
        except NotDone:  # then vLLM ends it
            self._is_begun = False
            raise

    def load(self, wait_s: float = WAIT_S) -> None:
        """What was fetched (in place it is read now), which ends the update; the engine computes nothing meanwhile."""
        self._tell("finish_weight_update", wait_s)
        self._is_begun = False

    def leave(self) -> None:
        """The ranks are no replicas any more. An update that came to nothing is ended, and nothing is loaded."""
        if self._is_begun:
            self._tell("update_weights", update_info={"version": None})
            self._tell("finish_weight_update")
            self._is_begun = False
        self._tell("shutdown_weight_transfer_engine")

    def go_on(self, version: str) -> None:
        """Compute with that version, and with nothing that was computed with another."""
        raise NotImplementedError

    def resume(self) -> None:
        """Compute on with what there was: nothing has been loaded."""
        raise NotImplementedError

    def _tell(self, what: str, wait_s: float = WAIT_S, **body: Any) -> None:
        """All ranks, by vLLM's name for it. Raises `NotDone` if one of them could not take in what to fetch."""
        raise NotImplementedError


def engine_of(given: Any) -> Engine:
    """A `vllm.LLM`, or the address of a server."""
    return Server(given) if isinstance(given, str) else Offline(given)


class Offline(Engine):
    """A `vllm.LLM` of this process. Nobody else drives it while it is updated, so nothing needs to be paused."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self._llm = llm

    def go_on(self, version: str) -> None:
        self._llm.update_weight_version(version)
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.llm_engine.reset_encoder_cache()

    def resume(self) -> None:
        pass  # it was never paused

    def _tell(self, what: str, wait_s: float = WAIT_S, **body: Any) -> None:
        if what.startswith("shutdown"):
            self._llm.collective_rpc(what)
            return
        try:
            getattr(self._llm, what)(*([body] if body else []))
        except Exception as error:
            if what != "update_weights":
                raise
            raise NotDone(f"the engine could not take in {body['update_info']}: {error}") from error


class Server(Engine):
    """A server of vLLM, over HTTP."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url.rstrip("/")

    def load(self, wait_s: float = WAIT_S) -> None:
        self._tell("pause?mode=keep&clear_cache=true")  # prefix cache and all else that old weights have computed
        super().load(wait_s)

    def go_on(self, version: str) -> None:
        self._tell("update_weight_version", new_version=version)
        self.resume()  # not after an error: a paused engine answers nothing

    def resume(self) -> None:
        self._tell("resume")

    def _tell(self, what: str, wait_s: float = WAIT_S, **body: Any) -> None:
        headers = {"Content-Type": "application/json"}
        request = Request(f"{self._url}/{what}", json.dumps(body).encode(), headers)
        hint = "is VLLM_SERVER_DEV_MODE=1 set, and what does its log say?"
        try:
            with urlopen(request, timeout=wait_s + 30.0) as answer:
                answer.read()
        except HTTPError as error:
            text = f"{error.url}: {error.code} {error.read(2000).decode(errors='replace')}"
            raise NotDone(text, hint=hint) from error
        except OSError as error:
            raise tensorhub.Unavailable(f"{self._url}: {error}", hint=hint) from error
