"""A small published table for tests."""

TABLE = """
[table]
source = "Somebody"
title = "Table 1, digits"
tolerance = 0.9
seeds = 1

[base.task]
dataset = "digits"
model = "mlp-2"
data_options = { max_train = 200 }

[base.partition]
clients = 4

[base.method]
lr = 0.1
clip = 2.0

[base.run]
rounds = 3
sampler = "all"

[[row]]
name = "FedAvg"
group = "digits"
published = 0.5
method = { name = "fedavg" }

[[row]]
name = "UDP-FedAvg, sigma 1"
group = "digits"
published = 0.4
method = { name = "udp-fedavg", noise_multiplier = 1.0 }

[[row]]
name = "UDP-FedAvg, sigma 2"
group = "digits"
published = 0.3
method = { name = "udp-fedavg", noise_multiplier = 2.0 }

[reduced]
scale = "two rounds"
run = { rounds = 2 }
"""
