"""Settings of a secure sum, and the conditions under which it protects its participants.

Symbols: n the nodes invited to a round, t `threshold`, c `colluders`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.errors import InputError, whole_number

FEWEST_NODES = 3
DEFAULT_COLLUDERS = 1


@dataclass(frozen=True)
class SecureSum:
    """Secure aggregation: the server learns the sum of the uploads and nothing else about them.

    Attributes:
        threshold: A sum is revealed only if so many of the invited clients answer. None: the smallest valid threshold.
        colluders: The number of clients that may share everything they know with the server.

    Guarantees:
        A masked upload is uniform and independent of the input
        (`test_a_masked_upload_is_uniform_and_independent_of_the_input`). The sum is exact whoever drops out
        (`test_the_sum_is_exact_under_every_pattern_of_dropouts`).
    """

    threshold: int | None = None
    colluders: int = DEFAULT_COLLUDERS

    def __post_init__(self) -> None:
        object.__setattr__(self, "colluders", whole_number("aggregation.colluders", self.colluders, 0))
        if self.threshold is not None:
            object.__setattr__(self, "threshold", whole_number("aggregation.threshold", self.threshold, 1))

    def group(self, nodes: int, field: str = "nodes") -> Group:
        """The group of so many nodes; `field` is the key of their number, for errors."""
        if nodes < FEWEST_NODES:
            raise InputError(
                field,
                nodes,
                "with fewer than three nodes the sum discloses the other node's upload to a participant",
                f"Use {FEWEST_NODES} or more.",
            )
        threshold = self.threshold
        if threshold is None:
            threshold = smallest_threshold(nodes, self.colluders)
            if threshold > nodes:
                raise InputError(
                    "aggregation.colluders",
                    self.colluders,
                    f"no threshold of {nodes} nodes protects against so many colluders",
                    f"Use at most {nodes - 2}.",
                )
        return Group(nodes, threshold, self.colluders)


@dataclass(frozen=True)
class Group:
    """n nodes with threshold t, of which c may collude with the server.

    Guarantees: two different lists of survivors never both get t signatures (2t > n + c), and at least t - c >= 2
    members of every revealed sum are honest (`test_impossible_groups_are_refused`).

    Raises:
        InputError: The conditions do not hold.
    """

    nodes: int
    threshold: int
    colluders: int

    def __post_init__(self) -> None:
        n, t, c = self.nodes, self.threshold, self.colluders
        if n < FEWEST_NODES:
            raise InputError(
                "nodes", n, "a sum of fewer than three uploads protects nobody", "Use 3 or more."
            )
        if t > n:
            raise InputError(
                "aggregation.threshold", t, f"only {n} nodes are invited to a round", f"Use at most {n}."
            )
        if t <= 2 * n // 3:
            raise InputError(
                "aggregation.threshold",
                t,
                f"is not above two thirds of the {n} nodes of a round",
                f"Use {max(2 * n // 3 + 1, smallest_threshold(n, c))} to {n}.",
            )
        if 2 * t <= n + c:
            raise InputError(
                "aggregation.threshold",
                t,
                f"with {c} colluders among {n} nodes the server could get two lists of survivors signed",
                f"Use more than {(n + c) // 2}, or fewer colluders.",
            )
        if t - c < 2:
            raise InputError(
                "aggregation.colluders",
                c,
                f"of {t} uploads in a sum fewer than two would be honest",
                f"Use at most {t - 2}, or a larger threshold.",
            )

    @property
    def honest(self) -> int:
        """t - c: the smallest number of honest clients in a revealed sum."""
        return self.threshold - self.colluders


def smallest_threshold(nodes: int, colluders: int) -> int:
    """The smallest valid threshold; larger than `nodes` if there is none."""
    return max(2 * nodes // 3 + 1, (nodes + colluders) // 2 + 1, colluders + 2)
