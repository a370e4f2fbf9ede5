"""Tiny networks: random ones, and the table network, whose next-token law is whatever a table says."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mtp import Network, Trunk
from mtp.checkpoint import build_head


def tiny_trunk(seed: int = 0, layers: int = 4, vocab_size: int = 64, context: int = 256, **options) -> Trunk:
    """A Llama with random weights, large enough for its laws to differ clearly from token to token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context,
        initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, **options,
    )  # fmt: skip
    return Trunk(LlamaForCausalLM(config).eval())


def tiny_network(seed: int = 0, **options) -> Network:
    """A random trunk with all heads, which are random too: bad drafters."""
    trunk = tiny_trunk(seed, **options)
    heads = {kind: build_head(kind, trunk) for kind in ("sequential", "parallel", "early_exit")}
    return Network(trunk, heads).eval()


@torch.no_grad()
def table_trunk(table: Tensor, layers: int = 2, context: int = 256) -> Trunk:
    """A transformer whose logits after a token are exactly that token's row of table [V, V].

    Embedding i is the unit vector i, attention and MLP add nothing, and the final norm multiplies a unit
    vector by sqrt(V), which the output matrix takes back.
    """
    size = len(table)
    config = LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=layers,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=context,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.model.embed_tokens.weight.copy_(torch.eye(size))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.lm_head.weight.copy_(table.T / size**0.5)
    return Trunk(model)


def successor_table(successors: list[int], strength: float = 20.0) -> Tensor:
    """Logits that all but surely send token i to successors[i]."""
    return torch.nn.functional.one_hot(torch.tensor(successors), len(successors)).float() * strength
