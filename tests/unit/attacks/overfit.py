"""The network that membership attacks must see through, and what they make of it.

    python -m tests.unit.attacks.overfit [draws]

prints what each attack finds on draws 0, 1, 2, ... of members, wrong labels and starting weights. Width and epochs were
chosen on draw 0, so the gates are tested on others.
"""

from __future__ import annotations

import json
import sys
from functools import cache

import numpy as np
import torch
from torch import nn

from fedveil import Task
from fedveil.attacks.membership import all as _known  # noqa: F401  (registers them)
from fedveil.attacks.membership.score import MembershipFinding, area, judge
from fedveil.attacks.membership.threat_model import (
    Examples,
    MembershipView,
    Recipe,
    make_membership_attack,
    train_shadows,
)
from fedveil.data.dataset import Dataset
from fedveil.data.registry import load_dataset
from fedveil.streams import named_stream

MEMBERS = 400
HIDDEN, EPOCHS = 512, 60

# The AUC that each attack must reach on such a network.
GATES = {"loss-threshold": 0.73, "ml-leaks": 0.68, "white-box": 0.73, "lira": 0.85}


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


@cache
def overfit(draw: int = 0) -> MembershipView:
    """An overfit network: 400 digits, 20 % of the labels wrong; asked about are its members and as many others."""
    stream = named_stream(draw, "gate")
    data = load_dataset("digits")
    assert isinstance(data, Dataset)
    x, y = torch.cat([data.train.x, data.test.x]), torch.cat([data.train.y, data.test.y])
    order = stream.permutation(len(x))
    labels = y.numpy()[order]
    wrong = stream.random(len(labels)) < 0.2
    labels[wrong] = (labels[wrong] + stream.integers(1, 10, int(wrong.sum()))) % 10
    digits = Examples(x[torch.from_numpy(order)], torch.from_numpy(labels))
    task, recipe = Task(network), Recipe(0.1, 32, EPOCHS, MEMBERS, momentum=0.9)
    model = train_shadows(task, recipe, digits, [torch.arange(MEMBERS)], stream)
    asked, own = torch.arange(2 * MEMBERS), torch.arange(2 * MEMBERS, len(digits))
    return MembershipView(task, model, digits.take(asked), digits.take(own), recipe)


def found(name: str, draw: int) -> MembershipFinding:
    """What the attack makes of the members of a draw and as many others."""
    scores = make_membership_attack(name)(overfit(draw), named_stream(draw + 1, name))
    return judge(name, "the model", scores.numpy(), np.arange(2 * MEMBERS) < MEMBERS, named_stream(2))


def area_among_outsiders(name: str, draw: int) -> float:
    """The AUC for telling 400 examples that were not trained on from 500 more of them."""
    view = overfit(draw)
    outsiders = view.asked.take(torch.arange(MEMBERS, 2 * MEMBERS)) + view.own.take(torch.arange(500))
    own = view.own.take(torch.arange(500, len(view.own)))
    asked = MembershipView(view.task, view.models, outsiders, own, view.recipe)
    scores = make_membership_attack(name)(asked, named_stream(draw + 3, name)).numpy()
    return area(scores[:MEMBERS], scores[MEMBERS:])


def main(draws: int) -> None:
    for draw in range(draws):
        line: dict[str, float] = {"draw": draw}
        for name in GATES:
            finding = found(name, draw)
            line[name] = round(finding.auc.value, 3)
            line[f"{name}, outsiders"] = round(area_among_outsiders(name, draw), 3)
        line["lira, true positives at 1 % false"] = finding.tpr_at[0.01].value
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
