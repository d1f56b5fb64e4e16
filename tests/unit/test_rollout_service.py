"""The service's own address and key, which need no engine."""

import stat

import pytest

from megagrpo.rollout.service.addresses import interface_of, own_address
from megagrpo.rollout.service.node import free_port
from megagrpo.rollout.service.server import make_key
from megagrpo.system import environment


def test_host_is_an_address_or_an_interface():
    assert own_address("127.0.0.1") == own_address("lo") == own_address("localhost") == "127.0.0.1"
    assert own_address("0.0.0.0") == "0.0.0.0" and interface_of("0.0.0.0") is None
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(
        ValueError, match=r"rollout.host eht0 is no interface and no IPv4 address of .*'lo': \['127.0.0.1'\]"
    ):
        own_address("eht0")
    assert free_port("127.0.0.1") in range(20_000, 30_000)


def test_a_key_is_made_for_its_owner_alone_unless_it_is_given(tmp_path, monkeypatch):
    monkeypatch.delenv(environment.API_KEY, raising=False)
    file = tmp_path / "run" / "service.key"
    first, second = make_key(file), make_key(file)
    assert first != second == file.read_text() and len(second) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.unlink()
    monkeypatch.setenv(environment.API_KEY, "given by its user")
    assert make_key(file) == "given by its user" and not file.exists()
