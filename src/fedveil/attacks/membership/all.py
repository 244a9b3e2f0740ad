"""All membership attacks; importing this module registers them."""

from fedveil.attacks.membership import alignment, learned, lira, thresholds
from fedveil.attacks.membership.threat_model import MEMBERSHIP_ATTACKS, MembershipAttack

__all__ = ["alignment", "learned", "lira", "list_membership_attacks", "thresholds"]


def list_membership_attacks() -> list[type[MembershipAttack]]:
    """Every membership attack, by name."""
    return [MEMBERSHIP_ATTACKS[name] for name in sorted(MEMBERSHIP_ATTACKS)]
