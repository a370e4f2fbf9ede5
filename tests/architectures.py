"""A small random trunk of any supported architecture, and what holds of every form of its weights."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mtp import Trunk, UserError

LAYERS = 3


def config_of(model_type: str, **options):
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
        "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return AutoConfig.for_model(model_type, **sizes | options)


def trunk_of(model_type: str, **options) -> Trunk:
    """Random weights everywhere, the norms' too, so that a norm left out would show."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(model_type, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    return Trunk(model)


@torch.no_grad()
def rounded(module):
    """The same module with weights that are bfloat16 numbers, in float32."""
    for parameter in module.parameters():
        parameter.copy_(parameter.bfloat16())
    return module


@torch.no_grad()
def quantizable(network):
    """The same network with weights that stay what they are when they are quantized: whole numbers up to 127,
    which every row has, times a power of two."""
    for weight in network.parameters():
        if weight.dim() == 2:
            scale = 2 ** (weight.abs().amax(1, keepdim=True) / 127).log2().ceil()
            whole = (weight / scale).round()
            most = whole.abs().argmax(1, keepdim=True)
            weight.copy_(whole.scatter(1, most, 127 * whole.gather(1, most).sign()) * scale)
    return network


def agree(pair: tuple[Trunk, Trunk], tokens: torch.Tensor, *, atol: float, rtol: float, **options) -> None:
    """Two trunks give the same logits and the same states after every layer."""
    theirs, ours = (trunk(tokens, taps=tuple(range(LAYERS + 1)), **options) for trunk in pair)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=atol, rtol=rtol)
    assert ours.states.keys() == theirs.states.keys()
    for tap, state in theirs.states.items():
        torch.testing.assert_close(ours.states[tap], state, atol=atol, rtol=rtol)


def gives_all_back(network, change, form):
    """A network that `change` brings into a form cannot be saved until it is unpacked; then every module and
    every weight is what it was, in memory of its own."""
    modules, state = dict(network.named_modules()), copy.deepcopy(network.state_dict())
    change(network)
    assert network.form == form
    with pytest.raises(UserError, match="before it is saved, moved or cast"):
        network.state_dict()
    network.unpack()
    assert dict(network.named_modules()) == modules
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
    stores = [weight.untyped_storage().data_ptr() for weight in network.parameters()]
    assert len(set(stores)) == len(stores)
