"""Run the reduced rows of Tables II and IV and print each beside the paper's value.

    python experiments/dp_fedags/reduced.py --data FOLDER [--seeds 0 1 2] [--only mnist-eps-0.1]

With `--attack` the three membership attacks of Table II are run on each result.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from fedveil.attack_runs.membership import attack_result
from fedveil.experiment.config import load_config
from fedveil.experiment.run import run_seed

ATTACKS = ("loss-threshold", "ml-leaks", "white-box")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="Rows whose file name contains this.")
    parser.add_argument("--set", dest="changes", action="append", default=[])
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--attack", action="store_true")
    given = parser.parse_args()
    for path in sorted((Path(__file__).parent / "reduced").glob(f"*{given.only}*.toml")):
        config = load_config(path, [*given.changes, "run.workers=1"])
        scores: list[float] = []
        for seed in given.seeds:
            result = run_seed(config, seed, experiment=path.stem, results=given.results, data_dir=given.data)
            scores.append(100 * result.summary["accuracy"])
            if given.attack and result.folder is not None:
                for name in ATTACKS:
                    found = attack_result(result.folder, name, data_dir=given.data, examples=1000)
                    print(json.dumps({"row": path.stem, "seed": seed} | found.to_json()), flush=True)
        assert config.paper is not None
        line = {
            "row": path.stem,
            "changes": given.changes,
            "paper": None if config.paper.expected is None else 100 * config.paper.expected,
            "accuracy": statistics.mean(scores),
            "spread": statistics.stdev(scores) if len(scores) > 1 else 0.0,
            "all": scores,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
