"""UDP-FedAvg: averaging under user-level differential privacy, noise added by the clients.

Algorithm 1 of Li et al.: Clients Collaborate: Flexible Differentially Private Federated Learning with Guaranteed
Improvement of Utility-Privacy Trade-off. ICML 2025.

Symbols: C `clip`, sigma `noise_multiplier`, K the size of the cohort (of Poisson cohorts p N is its expectation,
`plan.cohort`), E `epochs`, B `batch_size`, eta `lr`.

Deviations:
- Line 10 multiplies update and noise by eta again; here `server_lr`, 1 by default, is used, since the update is
  already a difference of models.
- `noise_scope = "local"`: each client adds the full sigma C, so that its upload alone is protected; the paper's
  `"shared"` adds sigma C / sqrt(K), and only the sum of K uploads carries sigma C.
- Poisson cohorts: the summed updates are divided by the constant p N, never by the number of participants. The size K
  is announced to the cohort and each client adds sigma C / sqrt(max(K, p N)); the server, which is trusted for that,
  adds the missing noise if fewer (or no) clients participated or answered. So the sum's noise is always sigma C and
  does not disclose how many participated. With `"local"` it does, and participation counts as visible.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.methods.fields import STRICT, bounded, without_local_noise
from fedveil.methods.method import At, ClientSum, register
from fedveil.methods.shared_model import Server
from fedveil.methods.user_level import CohortModel, NoisyModel, UserLevelAveraging
from fedveil.privacy.mechanisms import gaussian
from fedveil.privacy.private_sum import NoisySum
from fedveil.privacy.releases import Plan
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.tree import Params, State, sub


@register(
    "udp-fedavg",
    "averaging under user-level DP: clipped updates, Gaussian noise from the clients",
    server=Server,
    down=CohortModel,
    up=NoisyModel,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class UDPFedAvg(UserLevelAveraging):
    def client_update(
        self, task: Task, at: At, down: CohortModel, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[NoisyModel, State]:
        update = sub(self.train(task, at, down.params, data, rng).params, down.params)
        return self.noisy_model(at, down, update, rng), state  # lines 8-10

    def _contribution(
        self, task: Task, at: At, down: CohortModel, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Params, State]:
        """Each client's contribution before clipping."""
        update = sub(self.train(task, at, down.params, data, rng).params, down.params)
        return bounded(update, self.clip, self.normalise), state

    def client_sum(self) -> ClientSum[Server, CohortModel]:
        without_local_noise(self.noise_scope, "shared")
        return ClientSum(gaussian(self.clip, self.noise_multiplier), self._contribution, self._after_sum)

    def _after_sum(self, at: At, server: Server, total: NoisySum) -> Server:
        return Server(total.added_to(server.params, self.server_lr))

    def paper_claim(self, plan: Plan) -> str | None:
        return "user-level (epsilon, delta)-DP with sigma = O(q sqrt(T log(1/delta)) / epsilon), no constant given"
