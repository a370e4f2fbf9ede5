"""Tiny networks: random ones, and the table network, whose next-token law is whatever a table says."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mtp import Network, Trunk
from mtp.checkpoint import build_head
from training.tokenizer import BEGIN, END, wrap

# Overrides of conf/train.yaml for a run of a second.
TINY = [
    "data=files", "data.row_length=16", "data.batch_size=3", "data.max_validation_rows=4",
    "data.validation_fraction=0.1", "trunk.config.hidden_size=16", "trunk.config.head_dim=8",
    "trunk.config.num_attention_heads=2", "trunk.config.num_key_value_heads=1",
    "trunk.config.intermediate_size=24", "trunk.config.num_hidden_layers=3", "trunk.config.vocab_size=300",
    "head=[sequential,early_exit]", "heads.sequential.depth=2", "objective=layerskip",
    "trainer.warmup_steps=2", "trainer.log_every=2", "trainer.validate_every=4", "trainer.max_steps=7",
    "trainer.precision=32",
]  # fmt: skip


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
    kinds = ("sequential", "parallel", "early_exit", "medusa", "eagle")
    heads = {kind: build_head(kind, trunk) for kind in kinds}
    with torch.no_grad():
        for head in heads["medusa"].heads:  # as it begins it is the trunk's own next-token head
            head.layers[0].weight.normal_(std=0.3)
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


@torch.no_grad()
def chain_network(
    successors: list[int], *, guess: list[int] | None = None, tokenizer: PreTrainedTokenizerFast | None = None
) -> Network:
    """The table network that sends token i to successors[i], with heads that know it: perfect drafters.

    With `guess` the sequential and the parallel head take token i for guess[i]: wrong where the two have
    different successors.
    """
    size, guess = len(successors), guess or list(range(len(successors)))
    trunk = table_trunk(successor_table(successors))
    trunk.config.intermediate_size = size  # a parallel block moves token i's unit vector through its MLP
    heads = {kind: build_head(kind, trunk) for kind in ("sequential", "parallel", "early_exit")}
    for stage in heads["sequential"].stages:
        stage.eh_proj.weight.copy_(torch.cat([moving(guess), torch.zeros(size, size)], dim=1))
        stage.block.layer.self_attn.o_proj.weight.zero_()
        stage.block.layer.mlp.down_proj.weight.zero_()
    target = guess
    for block in heads["parallel"].blocks:
        target = [successors[token] for token in target]
        layer, length = block.layer, torch.tensor(size**0.5)  # of a unit vector after the norm
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.gate_proj.weight.copy_(torch.eye(size))
        layer.mlp.up_proj.weight.copy_(torch.eye(size))
        moved = torch.nn.functional.silu(length) * length
        layer.mlp.down_proj.weight.copy_((moving(target) - torch.eye(size)) / moved)
    return Network(trunk, heads, tokenizer).eval()


def moving(targets: list[int]) -> Tensor:
    """The matrix that takes unit vector i to unit vector targets[i]."""
    return torch.nn.functional.one_hot(torch.tensor(targets), len(targets)).float().T


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte b is id b + 2; ids 0 and 1 are <s> and </s>. A text is its bytes and nothing else."""
    symbols = bytes_to_unicode()
    vocabulary = {BEGIN: 0, END: 1} | {symbols[byte]: byte + 2 for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer)


def spelling_network(text: str | bytes, *, guess: list[int] | None = None) -> Network:
    """Spells `text` over and over, byte by byte; a byte that occurs twice goes on as it did first."""
    ids = [byte + 2 for byte in (text.encode() if isinstance(text, str) else text)]
    successors = list(range(258))
    for here, following in reversed(list(zip(ids, ids[1:] + ids[:1], strict=True))):
        successors[here] = following
    return chain_network(successors, guess=guess, tokenizer=byte_tokenizer())
