"""Who gets in: addresses that need keys, keys that are there or not, folders that are private."""

from __future__ import annotations

import os
import socket
import stat
import threading

import pytest
import zmq

from tests.unit.channel.ends import PATIENCE, Ends, make_hello
from titan_opd.channel import (
    Address,
    ChannelError,
    PayloadFetcher,
    PayloadStore,
    WorkerPort,
    ZmqTransport,
    generate_keys,
    load_keys,
)
from titan_opd.channel.addresses import check_address, needs_keys
from titan_opd.channel.keys import main
from titan_opd.channel.messages import WantSamples
from titan_opd.channel.wire import encode
from titan_opd.losses import TeacherScores

# ---- Addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5555", "tcp://127.3.2.1:*", "tcp://[::1]:5555", "ipc:///tmp/x/y"]
)
def test_addresses_within_the_machine_need_no_keys(endpoint):
    assert not needs_keys(endpoint)
    check_address(endpoint, keys=False)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://10.0.0.1:5555",
        "tcp://0.0.0.0:*",
        "tcp://[::]:5555",
        "tcp://node-7:5555",
        "tcp://localhost:1",
        "tcp://*:5",
    ],
)
def test_addresses_that_others_can_reach_need_keys(endpoint):
    check_address(endpoint, keys=True)
    with pytest.raises(ValueError, match=r"CURVE keys: make them with `python -m titan_opd.channel.keys"):
        check_address(endpoint, keys=False)
    with pytest.raises(ValueError, match="CURVE keys"):
        ZmqTransport().listen(endpoint, max_frame_bytes=1)
    with pytest.raises(ValueError, match="CURVE keys"):
        ZmqTransport().dial(Address(endpoint), max_frame_bytes=1)
    with pytest.raises(ValueError, match="CURVE keys"):
        ZmqTransport(stores=endpoint)


@pytest.mark.parametrize(
    "endpoint",
    ["", "127.0.0.1:5555", "tcp://127.0.0.1", "tcp://:5555", "tcp://127.0.0.1:0", "tcp://127.0.0.1:70000", "udp://a:1",
     "ipc://relative", "inproc://x", "tcp://127.0.0.1:http"],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_an_example(endpoint):
    with pytest.raises(ValueError, match=r"is no address; write tcp://127.0.0.1:5555"):
        check_address(endpoint, keys=True)


def test_stores_need_an_address_that_others_can_dial(tmp_path):
    generate_keys(tmp_path, ["worker"])
    with pytest.raises(ValueError, match="nobody can dial"):
        ZmqTransport(keys=load_keys(tmp_path, "worker"), stores="tcp://0.0.0.0:*")
    with pytest.raises(ValueError, match="write port \\*"):
        ZmqTransport(stores="tcp://127.0.0.1:5555")


def test_a_taken_port_is_named_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"{endpoint} is taken: .* Stop it .* choose another port"):
            ZmqTransport().listen(endpoint, max_frame_bytes=1)


def test_an_address_of_another_machine_cannot_be_listened_at(tmp_path):
    generate_keys(tmp_path, ["conductor"])
    with pytest.raises(ValueError, match=r"cannot listen at tcp://192.0.2.1:5555"):
        ZmqTransport(keys=load_keys(tmp_path, "conductor")).listen("tcp://192.0.2.1:5555", max_frame_bytes=1)


# ---- Private folders -------------------------------------------------------------------------------------------------


def test_the_folder_of_a_socket_is_made_private(tmp_path):
    listener = ZmqTransport().listen(f"ipc://{tmp_path}/new/conductor", max_frame_bytes=1)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    listener.close()


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ValueError, match=r"may enter .*open \(mode 755, .* chmod 700"):
        ZmqTransport().listen(f"ipc://{tmp_path}/open/conductor", max_frame_bytes=1)


def test_a_path_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(ValueError, match="more than 107 bytes"):
        ZmqTransport().listen(f"ipc://{tmp_path}/{'x' * 107}", max_frame_bytes=1)


# ---- Keys ------------------------------------------------------------------------------------------------------------


def test_keys_are_made_with_the_command_and_kept_secret(tmp_path, capsys):
    folder = tmp_path / "keys"
    assert main([str(folder), "conductor", "worker"]) == 0
    assert "goes to that member's machine and nowhere else" in capsys.readouterr().out
    assert sorted(os.listdir(folder)) == ["conductor.key_secret", "public", "worker.key_secret"]
    assert sorted(os.listdir(folder / "public")) == ["conductor.key", "worker.key"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "worker.key_secret").stat().st_mode) == 0o600
    keys = load_keys(folder, "worker")
    assert set(keys.members) == {"conductor", "worker"}
    assert keys.member(keys.public) == "worker"
    assert keys.secret not in repr(keys)
    assert keys.secret not in (folder / "public" / "worker.key").read_text()

    assert main([str(folder), "worker"]) == 1
    assert "has keys of 'worker' already" in capsys.readouterr().err
    assert load_keys(folder, "worker").secret == keys.secret
    assert main([str(folder)]) == 2
    for name in ("../worker", "", ".hidden", "a b"):
        with pytest.raises(ValueError, match="names no member"):
            generate_keys(folder, [name])


def test_keys_that_cannot_be_used_are_refused(tmp_path):
    generate_keys(tmp_path, ["worker"])
    with pytest.raises(ValueError, match=r"conductor.key_secret does not exist; make it with"):
        load_keys(tmp_path, "conductor")
    with pytest.raises(ValueError, match=r"has no conductor.key; copy it there"):
        load_keys(tmp_path, "worker").conductor  # noqa: B018
    (tmp_path / "worker.key_secret").chmod(0o640)
    with pytest.raises(ValueError, match=r"others may read .* \(mode 640\); chmod 600"):
        load_keys(tmp_path, "worker")
    (tmp_path / "worker.key_secret").chmod(0o600)
    (tmp_path / "worker.key_secret").write_text("no key")
    with pytest.raises(ValueError, match="cannot be read as a key"):
        load_keys(tmp_path, "worker")


@pytest.fixture
def guarded(tmp_path):
    """A conductor and a store with keys, and one who has none of their keys."""
    with Ends("curve", tmp_path) as ends:
        conductor = ends.conductor()
        store = PayloadStore(ends.of_workers, name="rollout-0", capacity_bytes=1 << 20, consumer="nobody")
        ends.callback(store.close)
        store.put("a:1", TeacherScores(), timeout=0)
        yield ends, conductor, store


def knock(context, address, folder, kind):
    """A stranger's socket that has sent a valid Hello: without keys, with its own, or with a guess at the server's."""
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    if kind != "no key":
        own_public, own_secret = zmq.curve_keypair()
        server = address.public_key.encode() if kind == "a key of its own" else zmq.curve_keypair()[0]
        stranger.curve_serverkey, stranger.curve_publickey, stranger.curve_secretkey = server, own_public, own_secret
    stranger.connect(address.endpoint)
    stranger.send(encode(make_hello(name="stranger")))
    stranger.send(encode(WantSamples(1)))
    return stranger


def old_protocol(address):
    """A socket that speaks ZeroMQ's oldest protocol, which knows no keys."""
    host, port = address.endpoint.removeprefix("tcp://").split(":")
    plain = socket.create_connection((host, int(port)))
    plain.sendall(b"\x01\x00\x06\x00hello")
    return plain


@pytest.mark.parametrize("kind", ["no key", "a key of its own", "another server's key"])
def test_who_has_no_key_gets_nothing_in_and_nothing_out(guarded, tmp_path, kind):
    ends, conductor, store = guarded
    with zmq.Context() as context:
        strangers = [knock(context, address, tmp_path, kind) for address in (conductor.address, store.address)]
        sockets = [old_protocol(address) for address in (conductor.address, store.address)]
        worker = ends.worker(conductor)  # takes longer than the strangers' knock, and gets in
        for _ in range(10):
            conductor.receive(0.05)
        assert set(conductor.peers) == {"rollout-0"}
        assert not any(name.startswith("refused") for name in conductor.counters)  # not a byte came through
        assert store.counters == {}
        for stranger in strangers:
            assert not stranger.poll(0)
            stranger.close()
        for plain in sockets:
            plain.close()
        worker.send(WantSamples(1))
        fetcher = PayloadFetcher(ends.of_conductor, name="rank-0")
        assert fetcher.fetch(store.address, "a:1", TeacherScores, timeout=PATIENCE) is not None
        fetcher.close()


def test_a_worker_whose_key_is_not_known_is_told(guarded, tmp_path):
    _, conductor, _ = guarded
    generate_keys(tmp_path / "others", ["worker"])
    (tmp_path / "others/public/conductor.key").write_text((tmp_path / "keys/public/conductor.key").read_text())
    transport = ZmqTransport(keys=load_keys(tmp_path / "others", "worker"))
    with pytest.raises(ChannelError, match="the key of this process is refused"):
        WorkerPort.connect(transport, conductor.address, make_hello(), timeout=PATIENCE)


def test_a_worker_that_takes_another_for_the_conductor_sends_it_nothing(guarded, tmp_path):
    ends, conductor, _ = guarded
    generate_keys(tmp_path / "false", ["conductor"])
    false_key = load_keys(tmp_path / "false", "conductor").public
    with pytest.raises(ValueError, match=r"which is not in .*public; copy it there if"):
        ends.of_workers.dial(Address(conductor.address.endpoint, false_key), max_frame_bytes=1)
    with pytest.raises(ValueError, match="the public key '', which is not in"):
        ends.of_workers.dial(Address(conductor.address.endpoint), max_frame_bytes=1)
    with pytest.raises(ValueError, match="wants CURVE keys and this process has none"):
        ZmqTransport().dial(conductor.address, max_frame_bytes=1)


def test_a_worker_without_keys_is_told_why_it_does_not_get_in(guarded):
    _, conductor, _ = guarded
    open_address = Address(conductor.address.endpoint)
    with pytest.raises(ChannelError, match=r"key of this process is refused|it wants a key"):
        WorkerPort.connect(ZmqTransport(), open_address, make_hello(), timeout=3.0)


def test_a_worker_with_keys_does_not_talk_to_an_open_conductor(guarded, tmp_path):
    ends, _, _ = guarded
    with Ends("tcp", tmp_path) as open_ends:
        open_conductor = open_ends.conductor()
        address = Address(open_conductor.address.endpoint, ends.of_workers._keys.conductor)
        result = []

        def connect():
            try:
                WorkerPort.connect(ends.of_workers, address, make_hello(), timeout=1.0)
            except ChannelError as error:
                result.append(error)

        thread = threading.Thread(target=connect)
        thread.start()
        while thread.is_alive():
            open_conductor.receive(0.05)
        assert "lacks, or has another key" in str(result[0]) or "refused" in str(result[0])
        assert open_conductor.counters["messages_received"] == 0


def test_keys_serve_addresses_that_others_can_reach(tmp_path):
    generate_keys(tmp_path, ["conductor", "worker"])
    listener = ZmqTransport(keys=load_keys(tmp_path, "conductor")).listen("tcp://0.0.0.0:*", max_frame_bytes=1000)
    port = listener.address.endpoint.rpartition(":")[2]
    dialer = ZmqTransport(keys=load_keys(tmp_path, "worker")).dial(
        Address(f"tcp://127.0.0.1:{port}", listener.address.public_key), max_frame_bytes=1000
    )
    dialer.wait_connected(PATIENCE)
    dialer.send([b"hello"])
    received = listener.receive(PATIENCE)
    assert bytes(received.frames[0]) == b"hello"
    assert received.origin == "127.0.0.1 with the key of 'worker'"
    dialer.close()
    listener.close()
