"""The handshake of an expert node with rank 0: both prove that they know the token of the launch, then rank 0 compares
versions, model files and partition, before either has loaded anything.

Rank 0 sends a nonce; the node answers with a nonce of its own, an HMAC over both and its facts, and the facts; rank 0
answers with an HMAC over both nonces. What follows is neither encrypted nor authenticated: nodes belong into a network
of their own (docs/scale.md). A refusal is one line, which the node prints and ends with.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping

from ktransformers.ground.errors import InputError
from ktransformers.serve.nodes.wire import MAX_TEXT_BYTES, Connection, ConnectionLost, Header, Kind

NONCE_BYTES, MAC_BYTES = 32, 32
HANDSHAKE_SECONDS = 10.0

Facts = Mapping[str, str]  # what has to be equal on all nodes, by name; and "rank"


class Refused(InputError):
    """Rank 0 does not take this node."""

    def __init__(self, reason: str) -> None:
        super().__init__("expert node", "a refusal of rank 0", reason)


def _mac(token: str, role: bytes, *parts: bytes | memoryview) -> bytes:
    digest = hmac.new(token.encode(), role, hashlib.sha256)
    for part in parts:
        digest.update(part)
    return digest.digest()


def introduce(connection: Connection, token: str, facts: Facts) -> None:
    """The node's part. Raises `Refused` with rank 0's reason."""
    header, payload = connection.receive(seconds=HANDSHAKE_SECONDS, limit=NONCE_BYTES)
    if header.kind != Kind.CHALLENGE or len(payload) != NONCE_BYTES:
        raise ConnectionLost("no challenge of a server of experts")
    theirs, own, document = bytes(payload), secrets.token_bytes(NONCE_BYTES), json.dumps(dict(facts)).encode()
    mac = _mac(token, b"host", theirs, own, document)
    connection.send(Header(Kind.HELLO), own, mac, document, seconds=HANDSHAKE_SECONDS)
    header, payload = connection.receive(seconds=HANDSHAKE_SECONDS, limit=MAX_TEXT_BYTES)
    if header.kind == Kind.REFUSED:
        connection.close()
        raise Refused(bytes(payload).decode("utf-8", "replace"))
    if header.kind != Kind.WELCOME or not hmac.compare_digest(bytes(payload), _mac(token, b"rank 0", own, theirs)):
        connection.close()
        raise Refused("the same KT_HOSTS_TOKEN on rank 0, which could not prove that it has it")


def receive_facts(connection: Connection, token: str) -> tuple[dict[str, str], bytes]:
    """Rank 0's part: the facts of a node that knows the token, and what `welcome` needs. Another node is refused."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send(Header(Kind.CHALLENGE), nonce, seconds=HANDSHAKE_SECONDS)
    header, payload = connection.receive(seconds=HANDSHAKE_SECONDS, limit=MAX_TEXT_BYTES)
    if header.kind != Kind.HELLO or len(payload) < NONCE_BYTES + MAC_BYTES:
        raise ConnectionLost("no greeting of an expert node")
    theirs, mac = bytes(payload[:NONCE_BYTES]), bytes(payload[NONCE_BYTES : NONCE_BYTES + MAC_BYTES])
    document = bytes(payload[NONCE_BYTES + MAC_BYTES :])
    if not hmac.compare_digest(mac, _mac(token, b"host", nonce, theirs, document)):
        refuse(connection, "the same KT_HOSTS_TOKEN on every node")
        raise ConnectionLost("a wrong token")
    facts = json.loads(document)
    return {str(name): str(value) for name, value in facts.items()}, _mac(token, b"rank 0", theirs, nonce)


def welcome(connection: Connection, proof: bytes) -> None:
    connection.send(Header(Kind.WELCOME), proof, seconds=HANDSHAKE_SECONDS)


def refuse(connection: Connection, reason: str) -> None:
    connection.send(Header(Kind.REFUSED), reason.encode()[:MAX_TEXT_BYTES], seconds=HANDSHAKE_SECONDS)
    connection.close()


def difference(own: Facts, theirs: Facts) -> str:
    """The first fact in which a node differs from rank 0; empty: none."""
    for name, value in own.items():
        if name != "rank" and theirs.get(name) != value:
            return f"{name} {value}, as on rank 0, not {theirs.get(name, 'none')}"
    return ""
