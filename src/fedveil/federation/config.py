"""What a node's own files say: which data it holds, and how it takes part. Nothing here comes from the server."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedveil.data.persons import check_persons
from fedveil.errors import InputError
from fedveil.validation import Section

NODE_FILE = "node.toml"
POLICY_FILE = "policy.toml"
SERVER_FILE = "server.toml"
REGISTRY = "registered.json"  # in the server's state: whose key is whose
MEMBERS = "FEDVEIL_MEMBERS"  # in the environment of a run's process: where the registry is
ROSTER = "FEDVEIL_ROSTER"  # in the environment of a run's process: where the server's roster is
SESSION = "FEDVEIL_SESSION"  # in the environment of a node: what no other start of it knows
HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"  # a name or an IPv4 address

Reader = Literal["npz", "pictures", "table", "texts"]


class DataSection(Section):
    """Where a node's examples are and how they are read; paths are relative to the node's folder.

    `npz`: arrays x and y. `pictures`: one folder per class. `table`: CSV or Parquet, with the schema that all
    nodes agreed on. `texts`: lines of a text, a tab and a label. `classes` fixes the order of the classes of pictures
    and texts, so that label 3 means the same everywhere; of arrays it is their number.

    `records`, `classes` and `labels` (the classes that the node has examples of) are public: the server is told them,
    and never anything that was counted in the data instead. Without `records` all examples count, and their number is
    public.

    `person` names the column of a table that says whose row it is; the node then trains on at most `rows_per_person`
    rows of each (1 if not given), which is public too.
    """

    reader: Reader
    path: Path
    schema_: Annotated[Path | None, Field(alias="schema")] = None
    classes: Annotated[int, Field(ge=2)] | tuple[str, ...] | None = None
    records: Annotated[int, Field(ge=1)] | None = None
    labels: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    channels: Annotated[int, Field(ge=1, le=4)] = 3
    person: str | None = None
    rows_per_person: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _complete(self) -> DataSection:
        if self.reader == "table" and self.schema_ is None:
            raise InputError(
                "data.schema",
                None,
                "a table needs the schema all nodes agreed on",
                "See `fedveil deploy schema`.",
            )
        if self.reader in ("pictures", "texts") and not self.class_names:
            raise InputError(
                "data.classes", None, f"{self.reader} need the classes in the agreed order", "List them."
            )
        if self.person is not None and self.reader != "table":
            raise InputError("data.person", self.person, "only tables name people", "Leave it out.")
        check_persons(self.person, self.rows_per_person)
        return self

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes in their order; empty where only their number is given, or nothing."""
        return self.classes if isinstance(self.classes, tuple) else ()


class TestingSection(Section):
    """Only for tests: noise that somebody can predict hides nothing."""

    seeded_noise: bool = False


class ConnectionSection(Section):
    """How a node reaches the server and proves who it is."""

    address: Annotated[str, Field(pattern=rf"^{HOST}:[0-9]{{1,5}}$")]
    ca: Path = Path("ca.crt")
    key: Path = Path("node.key")
    insecure: bool = False

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @model_validator(mode="after")
    def _safe(self) -> ConnectionSection:
        refuse_insecure(self.insecure, [self.host])
        return self


class ServerConfig(Section):
    """`server.toml`."""

    listen: Annotated[str, Field(pattern=r"^(localhost|[0-9]{1,3}(\.[0-9]{1,3}){3})$")] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8443
    names: Annotated[tuple[str, ...], Field(min_length=1)] = ("127.0.0.1",)
    """Under which names and addresses the nodes know it; its certificate holds them."""
    insecure: bool = False
    state: Path = Path("state")
    clients: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Which place on the client axis belongs to the node of this name, whose key is in `keys/NAME.pub`."""

    @model_validator(mode="after")
    def _safe(self) -> ServerConfig:
        refuse_insecure(self.insecure, [self.listen, *self.names])
        places = list(self.clients.values())
        for name, client in self.clients.items():
            if places.count(client) > 1:
                raise InputError(f"clients.{name}", client, "two nodes have this place", "Give each its own.")
        return self


class NodeConfig(Section):
    """`node.toml`."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    client: Annotated[int, Field(ge=0)]
    """The node's place on the client axis; no two nodes have the same."""
    state: Path = Path("state")
    data: DataSection
    connection: ConnectionSection | None = None
    testing: TestingSection = TestingSection()


def is_loopback(host: str) -> bool:
    """Whether this name or address never leaves the machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_insecure(insecure: bool, hosts: Sequence[str]) -> None:
    """Without TLS only on loopback."""
    for host in hosts if insecure else ():
        if not is_loopback(host):
            raise InputError(
                "insecure",
                host,
                "without TLS everybody on the way can read and change what is sent",
                "Leave insecure out, or use 127.0.0.1.",
            )
