"""What secure aggregation buys: noise and accuracy for one epsilon against the server, by who adds the noise.

    python experiments/secure/what_it_buys.py table
    python experiments/secure/what_it_buys.py run mnist --epsilon 3 8 --seeds 0 1 2
    python experiments/secure/what_it_buys.py page

`table` needs no data. `run` trains every combination and writes `experiments/records/secure-NAME.json`; what is there
is not trained again. Configurations are here; `mnist` is `experiments/best/server-mnist.toml`, which `letters` and
`cifar10` resemble in method and rounds. `page` writes the table of accuracies in docs/secure-aggregation.md from the
records.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from fedveil.experiment.config import Config, make_config
from fedveil.experiment.run import run_seed
from fedveil.experiment.target import method_of
from fedveil.privacy.releases import Plan

HERE = Path(__file__).parent
RECORDS = HERE.parent / "records"
PAGE = HERE.parents[1] / "docs" / "secure-aggregation.md"
BEGIN, END = "<!-- accuracies -->", "<!-- end of accuracies -->"
SHOWN = {
    "mnist-mlp": ("MNIST", "MLP-2"),
    "letters-mlp": ("EMNIST letters", "MLP-2"),
    "cifar10-mlp": ("CIFAR-10", "MLP-2"),
    "mnist": ("MNIST", "scattering"),
    "letters": ("EMNIST letters", "scattering"),
    "cifar10": ("CIFAR-10", "scattering"),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain, shared noise": {"aggregation": {"kind": "plain"}, "noise_scope": "shared"},
    "plain, local noise": {"aggregation": {"kind": "plain"}, "noise_scope": "local"},
    "secure": {"aggregation": {"kind": "secure"}, "noise_scope": "shared"},
}
# With all clients in every round an upload carries the same noise in both, so they are one run.
SAME = {"plain, local noise": "plain, shared noise"}
EPSILONS, CLIENTS, ROUNDS = (1.0, 3.0, 8.0), (10, 100, 1000), (20, 100)


def group(clients: int) -> dict[str, int]:
    """95 % of the clients answer, 5 % may collude; of ten clients nine and one."""
    return {"threshold": math.ceil(0.95 * clients) - (clients < 20), "colluders": max(1, clients // 20)}


def changed(name: str, kind: str, epsilon: float, clients: int | None = None) -> Config:
    own = HERE / f"{name}.toml"
    path = own if own.exists() else HERE.parent / "best" / f"server-{name}.toml"
    content = tomllib.loads(path.read_text())
    chosen = KINDS[kind]
    content["method"] |= {"noise_scope": chosen["noise_scope"]}
    content["privacy"]["target_epsilon"] = epsilon
    content["partition"]["clients"] = clients or content["partition"]["clients"]
    secure = chosen["aggregation"]["kind"] == "secure"
    content["aggregation"] = chosen["aggregation"] | (
        group(content["partition"]["clients"]) if secure else {}
    )
    return make_config(content)


def noise_of_mean(kind: str, multiplier: float, clients: int) -> float:
    """The standard deviation in each coordinate of the mean, in units of the clip, if all clients answer."""
    if kind == "plain, shared noise":
        return multiplier / clients
    if kind == "plain, local noise":
        return multiplier / math.sqrt(clients)
    honest = group(clients)["threshold"] - group(clients)["colluders"]
    return multiplier * math.sqrt(clients / honest) / clients


def table() -> list[dict[str, Any]]:
    rows = []
    for rounds in ROUNDS:
        for clients in CLIENTS:
            plan = Plan(clients, clients, "all", rounds, 1, 1)
            for epsilon in EPSILONS:
                row: dict[str, Any] = {"rounds": rounds, "clients": clients, "epsilon": epsilon}
                for kind in KINDS:
                    _, found = method_of(changed("mnist-mlp", kind, epsilon, clients), plan)
                    assert found is not None
                    row[kind] = noise_of_mean(kind, found.noise_multiplier, clients)
                rows.append(row)
                print(row, flush=True)
    return rows


def trained(name: str, kind: str, epsilon: float, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        found = run_seed(changed(name, kind, epsilon), seed, experiment=name, results=Path(place))
    proven = found.summary["privacy"]["proven"]
    return {
        "noise_multiplier": found.summary["target"]["noise_multiplier"],
        "epsilon_against_server": next(row["epsilon"] for row in proven if row["adversary"] == "server"),
        "accuracy": found.summary["accuracy"],
        "parameters": found.summary["parameters"],
        "rounds": len(found.history) and found.history[-1]["round"],
    }


def run(name: str, epsilons: list[float], seeds: list[int]) -> None:
    path = RECORDS / f"secure-{name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def known(key: dict[str, Any]) -> dict[str, Any] | None:
        return next((row for row in rows if key.items() <= row.items()), None)

    for epsilon, seed, kind in itertools.product(epsilons, seeds, KINDS):
        key = {"aggregation": kind, "epsilon": epsilon, "seed": seed}
        if known(key):
            continue
        same = known(key | {"aggregation": SAME[kind]}) if kind in SAME else None
        facts = same | {"trained_as": SAME[kind]} if same else trained(name, kind, epsilon, seed)
        rows.append(facts | key)
        print(rows[-1], flush=True)
        RECORDS.mkdir(exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")


def accuracies() -> list[str]:
    """The lines of the table: mean and standard deviation over seeds, in percent."""
    lines = ["| data | model | epsilon | plain | secure |", "|---|---|---|---|---|"]
    for name, (data, model) in SHOWN.items():
        path = RECORDS / f"secure-{name}.json"
        rows = json.loads(path.read_text()) if path.exists() else []
        for epsilon in sorted({row["epsilon"] for row in rows}):
            cells = [data, model, f"{epsilon:g}"]
            for kind in ("plain, shared noise", "secure"):
                found = [
                    100 * r["accuracy"] for r in rows if r["aggregation"] == kind and r["epsilon"] == epsilon
                ]
                cells.append(f"{statistics.fmean(found):.1f} ± {statistics.stdev(found):.1f}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def with_table(page: str) -> str:
    """The page with its table of accuracies written anew."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return "\n".join([f"{before}{BEGIN}", *accuracies(), f"{END}{after}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table")
    commands.add_parser("page")
    runs = commands.add_parser("run")
    runs.add_argument("name")
    runs.add_argument("--epsilon", type=float, nargs="+", default=[3.0, 8.0])
    runs.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    if given.command == "table":
        rows = table()
        RECORDS.mkdir(exist_ok=True)
        (RECORDS / "secure-noise.json").write_text(json.dumps(rows, indent=1) + "\n")
    elif given.command == "page":
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        run(given.name, given.epsilon, given.seeds)


if __name__ == "__main__":
    main()
