"""vLLM takes its weights from TensorHub: the weight-transfer backend "tensorhub", and who drives it.

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
   a name may be somebody else's.
5. A load that fails half-way leaves a mixture. All ranks then refuse to compute, until a load has succeeded.

It must never: let two ranks load different versions, or import vLLM before it is used.
"""

import time
from collections.abc import Sequence
from typing import Any

import tensorhub

from .vllm_engines import NOTHING, WAIT_S, Engine, engine_of
from .whole import latest, newest_version, of_view

BACKEND = "tensorhub"


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
    updater = Updater(engine_of(engine), model, replica, options, in_place=in_place, ignore=ignore)
    updater.update(timeout=timeout)
    return updater


class Updater:
    """Brings an engine to newer versions. Made by `attach`; as a context, it leaves at the end."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        replica: str,
        options: dict[str, Any],
        *,
        in_place: bool = False,
        ignore: Sequence[str] = (),
    ) -> None:
        self.engine, self.model, self.replica = engine, model, replica
        patterns = [ignore] if isinstance(ignore, str) else [*ignore]
        self._joins = {"model": model, "replica": replica, "in_place": in_place, "ignore": patterns, "options": options}
        self._is_there = False  # the ranks have joined, as far as is known
        self._loaded: int | None = None  # what the ranks have, as they said; the engine may not have gone on with it
        self.version: int | None = None  # what the engine computes with; None: nothing that may be used
        self._view = tensorhub.connect(**of_view(options))

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
            except tensorhub.VersionUnavailable:  # a trainer in haste has gone on, and left it to nobody
                if time.monotonic() >= deadline or latest(self._view, self.model) in (wanted, None):
                    raise

    def _bring(self, wanted: int, deadline: float) -> int:
        if wanted == self.version and self._is_there:  # who has left may meet another job's version of that number
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
        """What the ranks say against it; None: it is so on all of them."""
        try:
            self.engine.init({**self._joins, **asked})
        except Exception as error:  # noqa: BLE001 - as above
            return error
        return None
