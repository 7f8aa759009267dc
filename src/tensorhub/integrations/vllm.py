"""vLLM takes its weights from TensorHub: the weight-transfer backend "tensorhub", and its driver.

    llm = vllm.LLM(path, load_format="dummy", weight_transfer_config={"backend": "tensorhub"})
    weights = tensorhub.integrations.vllm.attach(llm, "policy", replica="rollout-0")  # returns with a version in
    weights.update()  # between two batches

Or `attach("http://127.0.0.1:8000", …)` for a server (`VLLM_SERVER_DEV_MODE=1`), which is paused with its requests kept.
With `additional_config={"tensorhub": {"model": "policy", "replica": "rollout-0"}}` as well, an engine loads its first
version before it begins to serve.

Rules:
1. Each of vLLM's ranks is a replica of its own that holds the whole model on the host, by the names of the trainer's
   `state_dict()`: it serves others, also while vLLM computes. vLLM's layerwise reload fuses and cuts for its rank.
2. Or `in_place`: the ranks are the shards of one replica, over the parameters that vLLM computes with. They read what
   their parts are made of, from the trainer's shards and from engines with any number of ranks.
3. First all ranks fetch the version, then all load it. A fetch that fails on any rank changes nothing that vLLM
   computes with. While ranks fetch, vLLM goes on; only the loading pauses it. In place, to load is to read.
4. No rank raises in an update, since vLLM would then mistake what the other ranks answer for answers to the next call:
   whether all of them have loaded a version they are asked afterwards. The reference server knows replicas by name, and
   a name may be another process's.
5. A load that fails half-way leaves a mixture. All ranks then refuse to compute, until a load has succeeded.

It must never: let two ranks load different versions, or import vLLM before it is used.
"""

import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import tensorhub

from .whole import WAIT_S, latest, newest_version, of_view

BACKEND = "tensorhub"
NOTHING = -1  # no version: those begin at 0


def register() -> None:
    """The plugin: vLLM calls it in each of its processes."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "tensorhub.integrations.vllm_worker", "TensorHubWeightTransferEngine"
        )


def attach(
    engine: Any,
    model: str,
    *,
    replica: str,
    in_place: bool = False,
    ignore: Sequence[str] = (),
    timeout: float | None = None,
    **options: Any,
) -> "Updater":
    """Let the engine's ranks join `model`, and load a first version; returns when it is in.

    `engine` is a `vllm.LLM` or the address of a server. `in_place`: versions are read over the parameters that the
    engine computes with; refused, naming a parameter, where vLLM computes with something else, or they are no plain
    copies of what is published. `ignore`: tensors of these names, or patterns such as "value_head.*", are left out.
    `options` are those of `tensorhub.open`, plain values.
    """
    driven = Server(engine) if isinstance(engine, str) else Offline(engine)
    patterns = [ignore] if isinstance(ignore, str) else [*ignore]
    joins = {"model": model, "replica": replica, "in_place": in_place, "ignore": patterns, "options": options}
    updater = Updater(driven, joins)
    updater.update(timeout=timeout)
    return updater


class Updater:
    """Brings an engine to newer versions. Made by `attach`; as a context, it leaves at the end."""

    def __init__(self, engine: "Engine", joins: dict[str, Any]) -> None:
        self.engine, self.model, self.replica = engine, joins["model"], joins["replica"]
        self._joins = joins
        self._is_there = False  # the ranks have joined, as far as is known
        self._loaded: int | None = None  # what the ranks have, as they said; the engine may not have gone on with it
        self.version: int | None = None  # what the engine computes with; None: nothing that may be used
        self._view = tensorhub.connect(**of_view(joins["options"]))

    def __enter__(self) -> "Updater":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave, before the engine ends: its readers go elsewhere first, and the place of its replica is free at once.

        An engine that goes on computes with `version` as before. The next `update` joins again, and loads what there is
        then, also under the same number.
        """
        self._is_there = False
        self.engine.leave()

    def update(self, version: int | None = None, *, timeout: float | None = None) -> int:
        """Load the version, by default the newest one. Returns what the engine computes with. Waits for a first one.

        Where the newest is lost while it is fetched, the one that is the newest then is taken.
        Cheap when nothing is newer. On an error before loading, `version` is what it was and the engine goes on with
        it. On an error while loading it is None, and the engine answers nothing until an update has succeeded. So it is
        where all ranks have loaded it and the engine could not be told to go on: the next update tells it again.
        """
        deadline = time.monotonic() + (WAIT_S if timeout is None else timeout)
        if version is not None:
            return self._bring(version, deadline)
        while True:
            wanted = newest_version(self._view, self.model, deadline)
            try:
                return self._bring(wanted, deadline)
            except tensorhub.VersionUnavailable:  # the trainer has gone on, and no replica has kept it
                if time.monotonic() >= deadline or latest(self._view, self.model) in (wanted, None):
                    raise

    def _bring(self, wanted: int, deadline: float) -> int:
        if wanted == self.version and self._is_there:  # an engine that has left may meet another job's version
            return wanted
        if self.version is None or not self._is_there:
            self._join(deadline)
        self.engine.fetch(wanted, max(1.0, deadline - time.monotonic()))
        before, self.version = self._loaded, None
        self.engine.load(max(WAIT_S, deadline - time.monotonic()))
        missing = self._not_so(loaded=wanted)
        is_kept = missing is not None and self._not_so(kept=NOTHING if before is None else before) is None
        self._loaded = wanted if missing is None else before if is_kept else None
        if self._loaded is not None:
            self.engine.go_on(str(self._loaded))
            self.version = self._loaded  # not before: an engine that does not go on is told so by the next update
        if missing is not None:
            goes_on = f"and the engine goes on with {before}" if before is not None else "the engine has no version"
            if not is_kept and before is None and self._not_so(same=True) is None:  # another driver has loaded one
                self.engine.resume()
                is_kept, goes_on = True, "and the engine goes on with what it had"
            text = f"a rank could not fetch {self.model}@{wanted}, {goes_on}: {missing}"
            if not is_kept:
                text = f"{self.model}@{wanted} was loaded in part, the engine answers nothing now: {missing}"
            hint = "update() again when that is mended; the engine's log says more"
            raise tensorhub.VersionUnavailable(text, hint=hint) from missing
        return wanted

    def _join(self, deadline: float) -> None:
        """Whatever is wrong on a rank is raised, and none of them has joined then."""
        try:
            self.engine.init({**self._joins, "timeout": max(1.0, deadline - time.monotonic())})
        except Exception as error:  # vLLM tells what its ranks raised, but not of which class it was
            text = f"the engine could not join {self.model} as {self.replica}: {error}"
            raise tensorhub.TensorHubError(text, hint="the engine's log says more") from error
        self._is_there = True

    def _not_so(self, **asked: int) -> Exception | None:
        """The error of the ranks that deny it; None if it is true on all ranks."""
        try:
            self.engine.init({**self._joins, **asked})
        except Exception as error:  # noqa: BLE001 - as above
            return error
        return None


class EngineRefused(tensorhub.Unavailable):
    """The engine has answered that it did not carry out the request."""


class Engine:
    """One engine with all of its ranks.

    vLLM refuses to begin an update, and to let its ranks leave, before the update before has been finished.
    """

    def __init__(self) -> None:
        self._is_begun = False  # an update

    def init(self, init_info: dict[str, Any]) -> None:
        """All ranks open their workers and answer the questions of `InitInfo`. Raises if a rank fails or says no."""
        self._tell("init_weight_transfer_engine", init_info.get("timeout") or WAIT_S, init_info=init_info)

    def fetch(self, version: int, timeout: float) -> None:
        """Fetch as much as the engine allows while it computes, for a new update or again for a failed one."""
        if not self._is_begun:
            self._tell("start_weight_update")
            self._is_begun = True
        try:
            self._tell("update_weights", timeout, update_info={"version": version, "timeout": timeout})
        except EngineRefused:  # then vLLM ends it
            self._is_begun = False
            raise

    def load(self, wait_s: float = WAIT_S) -> None:
        """Load what was fetched and end the update. With `in_place` the ranks read now. The engine must be paused."""
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
        """Call a method of vLLM on all ranks. Raises `EngineRefused` if a rank could not start the fetch."""
        raise NotImplementedError


class Offline(Engine):
    """A `vllm.LLM` of this process. It computes nothing while it is updated: nothing is paused."""

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
            raise EngineRefused(f"the engine could not take in {body['update_info']}: {error}") from error


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
            raise EngineRefused(text, hint=hint) from error
        except OSError as error:
            raise tensorhub.Unavailable(f"{self._url}: {error}", hint=hint) from error
