"""A page that is open in a browser reaches no reference server, whatever its requests say."""

import asyncio
import socket

import aiohttp
import numpy as np
import pytest

import tensorhub
from tensorhub.protocol.messages import Report
from tensorhub.runtime.codec import encode

from .kit import eventually, hello, own_token

PAGES = {
    "a page": {"Origin": "https://example.org"},
    "a page in a frame": {"Origin": "null"},
    "a page of this host": {"Origin": "http://127.0.0.1"},
    "a picture": {"Sec-Fetch-Site": "cross-site"},
    "a picture in a notebook": {"Sec-Fetch-Site": "same-site"},
    "a name that was rebound": {"Host": "rebound.example.org:7450"},
    "an address in a name": {"Host": "127.0.0.1.example.org"},
    "a user before a host": {"Host": "127.0.0.1@example.org"},
    "a host in a path": {"Host": "example.org/127.0.0.1"},
    "no host": {"Host": ""},
}


@pytest.fixture
def server():
    with tensorhub.serve() as running:
        yield running


def ask(address: str, path: str, **headers: str) -> tuple[int, str]:
    """The status of an answer, and what it says."""
    shown = {"Authorization": f"Bearer {own_token()}"} | headers

    async def talk() -> tuple[int, str]:
        async with aiohttp.ClientSession() as http, http.get(f"http://{address}{path}", headers=shown) as answer:
            assert not any("access-control" in name.lower() for name in answer.headers)
            return answer.status, await answer.text()

    return asyncio.run(talk())


@pytest.mark.parametrize("headers", PAGES.values(), ids=PAGES)
def test_a_page_is_refused_though_it_has_the_token(server, headers) -> None:
    wanted = 421 if "Host" in headers else 403
    for path in ("/v1/session", "/v1/status", "/v1/wait?model=m&spec=1", "/healthz", "/nowhere"):
        assert ask(server.address, path, **headers)[0] == wanted

    async def join() -> int:
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.WSServerHandshakeError) as found:
                await http.ws_connect(f"http://{server.address}/v1/session", headers=headers)
            return found.value.status

    assert asyncio.run(join()) == wanted


def test_a_page_cannot_join_a_server_that_asks_for_no_token() -> None:
    """It published 1000, and a rollout's `update("latest")` brought that."""
    with tensorhub.serve(insecure=True) as server:

        async def publish(**headers: str) -> None:
            url = f"http://{server.address}/v1/session"
            async with aiohttp.ClientSession() as http, http.ws_connect(url, headers=headers) as socket:
                for message in (hello(model="policy", replica="page", token=""), Report(1)):
                    await socket.send_bytes(encode(message))
                await socket.receive(timeout=5)

        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            asyncio.run(publish(Origin="https://example.org"))
        assert server.status().models == ()
        asyncio.run(publish())
        assert [model.name for model in server.status().models] == ["policy"], "what is no page may"


def test_a_server_answers_to_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "Head.Cluster.example")
    with tensorhub.serve("0.0.0.0", names=["trainer.svc", "alias."]) as server:
        port = server.address.rpartition(":")[2]
        here = f"127.0.0.1:{port}"
        for name in ("127.0.0.1", "[::1]", "10.1.2.3", "LOCALHOST", socket.gethostname(), "trainer.svc.", "Alias"):
            assert ask(here, "/healthz", Host=f"{name}:{port}")[0] == 200, name
            assert ask(here, "/healthz", Host=name)[0] == 200, name
        eventually(lambda: ask(here, "/healthz", Host="head.cluster.example")[0] == 200, "its full name is known")
        status, text = ask(here, "/healthz", Host="cluster.example")
        assert status == 421
        assert "--name" in text
        assert "TENSORHUB_NAMES" in text


def test_no_request_looks_up_a_name(server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk() -> list[int]:
        async with aiohttp.ClientSession() as http:
            url, found = f"http://{server.address}/healthz", []
            for name in ("rebound.example.org", socket.gethostname()):
                async with http.get(url, headers={"Host": name}) as answer:
                    found.append(answer.status)
            return found

    for name in ("getaddrinfo", "gethostbyaddr", "gethostbyname", "getfqdn"):
        monkeypatch.setattr(socket, name, lambda *_, **__: pytest.fail("a name was looked up"))
    assert asyncio.run(talk()) == [421, 200]


def test_a_worker_and_a_question_hear_what_to_do_about_a_name(server, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up, port = socket.getaddrinfo, server.address.rpartition(":")[2]
    found = lambda host, *rest, **more: look_up("127.0.0.1" if host == "head.alias" else host, *rest, **more)  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", found)
    with pytest.raises(tensorhub.ServerUnreachable, match="it is not called so") as asked:
        tensorhub.connect(f"head.alias:{port}").models()
    with pytest.raises(tensorhub.ServerUnreachable, match="it is not called so") as opened:
        tensorhub.open("m", replica="r", server=f"head.alias:{port}", timeout=0.5)
    for error in (asked.value, opened.value):
        assert "TENSORHUB_NAMES" in str(error.hint)
        assert "--name" in str(error.hint)
    monkeypatch.setenv("TENSORHUB_NAMES", "other,head.alias")
    with tensorhub.serve() as named:
        address = f"head.alias:{named.address.rpartition(':')[2]}"
        with tensorhub.open("m", replica="r", server=address) as weights:
            weights.register({"w": np.zeros(4)})
            assert tensorhub.connect(address).models() == ["m"]
