"""The configuration files of nodes and servers, written by their operators."""

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
REGISTRY = "registered.json"  # in the server's state: the owner of each key
MEMBERS = "FEDVEIL_MEMBERS"  # environment variable of a run's process: the path of the registry
ROSTER = "FEDVEIL_ROSTER"  # environment variable of a run's process: the path of the server's roster
SESSION = "FEDVEIL_SESSION"  # environment variable of a node: a secret of this start of the node
HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"  # a name or an IPv4 address

Reader = Literal["npz", "pictures", "table", "texts"]


class DataSection(Section):
    """The location and format of a node's examples; paths are relative to the node's folder.

    `npz`: arrays x and y. `pictures`: one folder per class. `table`: CSV or Parquet, with the schema that all
    nodes agreed on. `texts`: lines of a text, a tab and a label. `classes` fixes the order of the classes of pictures
    and texts, so that labels mean the same on all nodes; for arrays it is the number of classes.

    `records`, `classes` and `labels` (the classes of the node's examples) are public: the server gets these declared
    values, never values counted in the data. Without `records` all examples are used, and their number is public.

    `person` names the column of a table that identifies the person of a row; the node then trains on at most
    `rows_per_person` rows of each person (default 1), which is public too.
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
                "a table needs the schema that all nodes agreed on",
                "Make one with `fedveil deploy schema`.",
            )
        if self.reader in ("pictures", "texts") and not self.class_names:
            raise InputError(
                "data.classes", None, f"{self.reader} need the classes in the agreed order", "List them."
            )
        if self.person is not None and self.reader != "table":
            raise InputError("data.person", self.person, "only tables identify persons", "Leave it out.")
        check_persons(self.person, self.rows_per_person)
        return self

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes in their order; empty if only their number or nothing is given."""
        return self.classes if isinstance(self.classes, tuple) else ()


class TestingSection(Section):
    """For tests only: predictable noise gives no protection."""

    seeded_noise: bool = False


class ConnectionSection(Section):
    """How a node connects to the server and authenticates itself."""

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
    """The server's names and addresses, which are in its certificate."""
    insecure: bool = False
    state: Path = Path("state")
    clients: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """The client number of each node by name; the node's key is in `keys/NAME.pub`."""

    @model_validator(mode="after")
    def _safe(self) -> ServerConfig:
        refuse_insecure(self.insecure, [self.listen, *self.names])
        places = list(self.clients.values())
        for name, client in self.clients.items():
            if places.count(client) > 1:
                raise InputError(
                    f"clients.{name}", client, "two nodes have this client number", "Give each its own."
                )
        return self


class NodeConfig(Section):
    """`node.toml`."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    client: Annotated[int, Field(ge=0)]
    """The node's position on the client axis, unique among the nodes."""
    state: Path = Path("state")
    data: DataSection
    connection: ConnectionSection | None = None
    testing: TestingSection = TestingSection()


def is_loopback(host: str) -> bool:
    """Whether this name or address refers to this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_insecure(insecure: bool, hosts: Sequence[str]) -> None:
    """Refuse connections without TLS, except on loopback."""
    for host in hosts if insecure else ():
        if not is_loopback(host):
            raise InputError(
                "insecure",
                host,
                "without TLS everybody on the network path can read and change messages",
                "Leave insecure out, or use 127.0.0.1.",
            )
