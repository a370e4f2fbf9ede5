import copy

import pytest
import torch
from tiny import tiny_network
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from training.sharding import clip, shard, sum_pieces, whole_state


@pytest.fixture
def mesh(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_layers_of_trunk_and_heads_lie_in_pieces_and_compute_the_same(mesh):
    network = tiny_network().requires_grad_(True)
    plain, tokens = copy.deepcopy(network), torch.tensor([[1, 2, 3, 4]])
    for _ in range(2):  # Lightning asks before training and before a validation
        shard(network, mesh)
    in_pieces = {name for name, weight in network.named_parameters() if isinstance(weight, DTensor)}
    assert "trunk.model.model.layers.3.mlp.up_proj.weight" in in_pieces
    assert any(name.startswith("heads.sequential.stages.0.block") for name in in_pieces)
    assert "trunk.model.lm_head.weight" not in in_pieces
    for each in (plain, network):
        each.trunk(tokens).logits.square().sum().backward()
    torch.testing.assert_close(network.trunk(tokens).logits, plain.trunk(tokens).logits)
    whole = sum_pieces(network.parameters(), processes=1)
    assert not any(isinstance(weight, DTensor) for weight in whole)
    norms = [clip(list(each.parameters()), 0.5).item() for each in (plain, network)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for (name, of_plain), sharded in zip(plain.named_parameters(), network.parameters(), strict=True):
        if of_plain.grad is not None:
            grad = sharded.grad.full_tensor() if name in in_pieces else sharded.grad
            torch.testing.assert_close(grad, of_plain.grad, rtol=1e-4, atol=1e-6)
    state = whole_state(network)
    assert all(torch.equal(state[name], weight) for name, weight in plain.state_dict().items())
