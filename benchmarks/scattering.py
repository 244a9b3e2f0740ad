"""How long scattering features of 60,000 images of 28x28 take: at most 30 seconds on two cores.

    python benchmarks/scattering.py [--images 60000]

Times include drawing the constants. The cache is not used.
"""

from __future__ import annotations

import argparse
import time

import torch

from fedveil.features.feature_map import ScatteringFeatures
from fedveil.features.normalise import constants

TARGET = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=60_000)
    images = torch.rand(parser.parse_args().images, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    constants.cache_clear()
    start = time.perf_counter()
    features = ScatteringFeatures(synthetic="strokes").compute(images)
    seconds = time.perf_counter() - start
    met = "met" if seconds <= TARGET else "missed"
    print(
        f"{len(images)} images, {features.shape[1]} features each, {torch.get_num_threads()} threads: {seconds:.1f} s "
        f"(target {TARGET:.0f} s for 60000 on two cores: {met})"
    )


if __name__ == "__main__":
    main()
