"""Rounds of federated averaging through Apple's pfl, PyTorch backend."""

from __future__ import annotations

import contextlib
import io

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from fedveil import make_model
from simulator import Workload, make_data

_NEVER = 10**9


class _Net(nn.Module):
    """A model with the two methods that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.inner.train()(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class PflRounds:
    """Every call is one round; the first also evaluates, so it belongs to the start-up."""

    def __init__(self, workload: Workload) -> None:
        data = make_data(workload)
        ids = list(range(workload.clients))
        users = [
            PyTorchTensorDataset((data.x[part], data.y[part]), user_id=str(k))
            for k, part in zip(ids, data.parts, strict=True)
        ]
        federated = FederatedDataset(lambda k: users[k], get_user_sampler("minimize_reuse", ids))
        net = _Net(make_model(workload.model, workload.input_shape, workload.classes, seed=0))
        self._model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
        self._backend = SimulatedBackend(training_data=federated, val_data=federated)
        self._algorithm = FederatedAveraging()
        self._train = NNTrainHyperParams(
            local_num_epochs=workload.epochs, local_learning_rate=0.1, local_batch_size=64
        )
        self._clients = workload.clients
        self._rounds = 0

    def __call__(self) -> None:
        self._rounds += 1
        params = NNAlgorithmParams(
            central_num_iterations=self._rounds,
            evaluation_frequency=_NEVER,
            train_cohort_size=self._clients,
            val_cohort_size=None,
        )
        with contextlib.redirect_stdout(io.StringIO()):  # pfl prints a report of every round
            self._algorithm.run(params, self._backend, self._model, self._train, callbacks=[])
