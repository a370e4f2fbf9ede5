"""Networks on disk: the round trip loses nothing, and what does not belong together is refused."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import byte_tokenizer, tiny_network
from transformers import AutoModelForCausalLM

import mtp.network
from mtp import Network, UserError
from mtp.checkpoint import fingerprint

TOKENS = torch.tensor([[1, 5, 2, 2, 9, 7, 30, 4]])
HEADS = ("sequential", "parallel", "early_exit")


@torch.no_grad()
def everything_said(network) -> dict[str, torch.Tensor]:
    """The logits of the trunk and of every readout of every head."""
    trunk = network.trunk
    said = {"trunk": trunk(TOKENS).logits}
    for name, head in network.heads.items():
        for readout in head.readouts(trunk, TOKENS, trunk(TOKENS, taps=head.taps).states):
            own = readout.matrix is not None
            said[f"{name}/{readout.name}"] = (
                readout.hidden @ readout.matrix.T if own else trunk.lm_head(readout.hidden)
            )
    return said


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, network):
    """A folder that tests only read."""
    folder = tmp_path_factory.mktemp("networks") / "saved"
    network.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it that a test may spoil."""
    return shutil.copytree(saved, tmp_path / "network")


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_saved_can_be_read_by_whom_the_umask_lets(tmp_path, network):
    before = os.umask(0o027)
    try:
        network.save_pretrained(tmp_path / "network")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "network").rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files)
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_network_says_the_same_bit_for_bit(tmp_path, dtype, tied):
    tiny_network(seed=3, tie_word_embeddings=tied).save_pretrained(tmp_path / "first")
    network = Network.from_pretrained(tmp_path / "first", dtype=dtype)
    network.save_pretrained(tmp_path / "network")
    loaded = Network.from_pretrained(tmp_path / "network")
    assert loaded.trunk.dtype == dtype
    assert all(parameter.dtype == dtype for parameter in loaded.parameters())
    assert everything_said(network).keys() >= {
        "trunk",
        "sequential/depth4",
        "parallel/depth4",
        "early_exit/layer3",
    }
    assert same(everything_said(network), everything_said(loaded))
    assert not loaded.training


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights_are_one_storage_after_loading_and_untied_ones_are_two(tmp_path, tied):
    tiny_network(tie_word_embeddings=tied).save_pretrained(tmp_path / "network")
    model = Network.from_pretrained(tmp_path / "network").trunk.model
    embedding, output = model.model.embed_tokens.weight, model.lm_head.weight
    assert (embedding.data_ptr() == output.data_ptr()) == tied
    embedding[3] += 1.0
    assert torch.equal(embedding, output) == tied


def test_one_training_step_moves_both_of_two_tied_weights(tmp_path):
    tiny_network(tie_word_embeddings=True).save_pretrained(tmp_path / "network")
    network = Network.from_pretrained(tmp_path / "network")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    before = network.trunk.model.lm_head.weight.clone()
    network.trunk(TOKENS).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    after = network.trunk.model
    assert not torch.equal(after.lm_head.weight, before)
    assert torch.equal(after.lm_head.weight, after.model.embed_tokens.weight)
    network.save_pretrained(tmp_path / "again")
    assert same(everything_said(network), everything_said(Network.from_pretrained(tmp_path / "again")))


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_transformers_loads_the_trunk_alone_from_the_folder(tmp_path, tied):
    network = tiny_network(tie_word_embeddings=tied)
    network.save_pretrained(tmp_path / "network")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "network", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(model(TOKENS).logits, network.trunk(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_saving_in_another_dtype_leaves_the_network_as_it_was(network, tmp_path):
    before = everything_said(network)
    network.save_pretrained(tmp_path / "network", dtype=torch.bfloat16)
    assert same(before, everything_said(network))
    stored = load_file(tmp_path / "network" / "heads" / "sequential" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    loaded = Network.from_pretrained(tmp_path / "network", dtype=torch.float32)
    rounded = network.state_dict()["trunk.model.lm_head.weight"].bfloat16().float()
    assert torch.equal(loaded.trunk.model.lm_head.weight, rounded)


def test_the_tokenizer_comes_along_and_a_folder_without_one_has_none(saved, tmp_path):
    network = tiny_network(layers=2, vocab_size=258)
    network.tokenizer = byte_tokenizer()
    network.save_pretrained(tmp_path / "network")
    tokenizer = Network.from_pretrained(tmp_path / "network").tokenizer
    assert tokenizer("aé <s>")["input_ids"] == [byte + 2 for byte in "aé <s>".encode()]
    assert Network.from_pretrained(saved).tokenizer is None


@pytest.mark.parametrize("dtype", [None, torch.float32, "bfloat16"])
def test_the_fingerprint_holds_in_whatever_dtype_the_folder_is_loaded(tmp_path, network, dtype):
    network.save_pretrained(tmp_path / "network", dtype=torch.bfloat16)
    assert set(Network.from_pretrained(tmp_path / "network", dtype=dtype).heads) >= set(HEADS)


def test_loaded_in_float32_and_saved_as_bfloat16_again_a_trunk_keeps_its_fingerprint(tmp_path, network):
    network.save_pretrained(tmp_path / "first", dtype=torch.bfloat16)
    loaded = Network.from_pretrained(tmp_path / "first", dtype=torch.float32)
    loaded.save_pretrained(tmp_path / "second", dtype=torch.bfloat16)
    assert fingerprint(tmp_path / "first") == fingerprint(tmp_path / "second")
    assert fingerprint(tmp_path / "first") != trunk_of(tmp_path, loaded)


def trunk_of(tmp_path, network) -> str:
    network.save_pretrained(tmp_path / "float32")
    return fingerprint(tmp_path / "float32")


def test_the_heads_know_the_fingerprint_and_the_provenance(tmp_path, network):
    network.save_pretrained(tmp_path / "network", provenance={"seed": 7})
    trunk = fingerprint(tmp_path / "network")
    for name in HEADS:
        head = tmp_path / "network" / "heads" / name
        assert json.loads((head / "config.json").read_text())["trunk"] == trunk
        assert json.loads((head / "provenance.json").read_text()) == {"seed": 7, "trunk": trunk}


def test_one_changed_weight_changes_the_fingerprint_and_the_heads_are_refused(folder):
    before = fingerprint(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 2**-20
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(folder) != before
    with pytest.raises(UserError, match=r"heads/\w+ is of trunk [0-9a-f]{12}, but this trunk is"):
        Network.from_pretrained(folder)


def test_a_head_of_another_trunk_is_refused_by_its_folder(folder, tmp_path):
    tiny_network(seed=9).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"other/heads/\w+ is of trunk"):
        Network.from_pretrained(folder, heads=tmp_path / "other")


def test_heads_of_another_folder_join_the_trunk_they_were_trained_on(network, folder, tmp_path):
    shutil.rmtree(folder / "heads")
    assert len(Network.from_pretrained(folder).heads) == 0
    network.save_pretrained(tmp_path / "other")
    grafted = Network.from_pretrained(folder, heads=tmp_path / "other")
    assert same(everything_said(network), everything_said(grafted))


def test_a_folder_to_take_heads_from_must_have_some(folder, tmp_path):
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns("heads"))
    with pytest.raises(UserError, match=r"heads: .*plain has no heads"):
        Network.from_pretrained(folder, heads=plain)


@pytest.mark.parametrize("kept", [0, 5, 500, -1])
@pytest.mark.parametrize("name", ["model.safetensors", "heads/parallel/model.safetensors"])
def test_weights_that_were_cut_off_are_refused(folder, name, kept):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:kept])
    with pytest.raises(UserError, match=f"{name} is not a whole safetensors file"):
        Network.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_head_without_one_of_its_files_is_refused(folder, name):
    (folder / "heads" / "parallel" / name).unlink()
    with pytest.raises(UserError, match=f"heads/parallel/{name}"):
        Network.from_pretrained(folder)


@pytest.mark.parametrize("key", ["kind", "options", "trunk"])
@pytest.mark.parametrize("value", [None, 5])
def test_a_head_whose_config_lacks_a_key_or_has_nonsense_there_is_refused(folder, key, value):
    change_json(folder / "heads" / "sequential" / "config.json", **{key: value})
    with pytest.raises(UserError, match=rf"heads/sequential/config\.json has {value} as '{key}'"):
        Network.from_pretrained(folder)


@pytest.mark.parametrize("depth", [3, 5, "x", 0])
def test_a_head_whose_config_does_not_fit_its_weights_is_refused(folder, depth):
    change_json(folder / "heads" / "sequential" / "config.json", options={"depth": depth})
    with pytest.raises(UserError, match=r"does not fit its config|depth="):
        Network.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not one of"),
        ({"num_hidden_layers": 5}, "lacks the weights model.layers.4"),
        ({"hidden_size": 64}, "has the wrong size of the weights lm_head.weight"),
        ({"vocab_size": 65}, "has the wrong size of the weights lm_head.weight and 1 more"),
        ({"num_hidden_layers": "five"}, "cannot be loaded"),
        ({"num_attention_heads": 0}, "cannot be loaded"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused_in_one_line(folder, capfd, changes, told):
    change_json(folder / "config.json", **changes)
    shutil.rmtree(folder / "heads")
    mtp.network.transformers.utils.logging.disable_progress_bar()
    with pytest.raises(UserError, match=told) as error:
        Network.from_pretrained(folder)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


def test_a_config_that_is_no_json_is_refused(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        Network.from_pretrained(folder)


@pytest.mark.parametrize("name", ["none", "none/at/all"])
def test_a_missing_folder_is_refused_by_name(tmp_path, name):
    with pytest.raises(UserError, match=f"{name} is not a network folder"):
        Network.from_pretrained(tmp_path / name)


def test_an_empty_folder_and_a_file_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        Network.from_pretrained(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a network folder"):
        Network.from_pretrained(tmp_path / "file")


def test_a_folder_that_is_no_head_is_named_or_passed_over(folder):
    (folder / "heads" / ".ipynb_checkpoints").mkdir()
    (folder / "heads" / "README.md").write_text("notes")
    assert set(Network.from_pretrained(folder).heads) >= set(HEADS)
    shutil.copytree(folder / "heads" / "sequential", folder / "heads" / "sequential.old")
    with pytest.raises(UserError, match=r"sequential\.old cannot be a head"):
        Network.from_pretrained(folder)


def test_saving_over_a_folder_replaces_our_files_and_keeps_foreign_ones(folder):
    (folder / "README.md").write_text("a card")
    (folder / "heads" / "sequential" / "notes.txt").write_text("a note")
    newer = tiny_network(seed=5)
    newer.save_pretrained(folder)
    assert (folder / "README.md").read_text() == "a card"
    assert (folder / "heads" / "sequential" / "notes.txt").read_text() == "a note"
    assert same(everything_said(newer), everything_said(Network.from_pretrained(folder)))


@pytest.mark.parametrize("exists", [True, False])
def test_a_failure_while_saving_leaves_everything_as_it_was(folder, tmp_path, monkeypatch, exists):
    if not exists:
        shutil.rmtree(folder)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    save_head, calls = mtp.network.save_head, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError("disk full")
        save_head(*arguments)

    monkeypatch.setattr(mtp.network, "save_head", failing)
    with pytest.raises(OSError, match="disk full"):
        tiny_network(seed=5).save_pretrained(folder)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert folder.exists() == exists


def test_a_network_with_one_head_saves_and_loads_that_one(network, tmp_path):
    Network(network.trunk, {"mine": network.heads["parallel"]}).save_pretrained(tmp_path / "network")
    loaded = Network.from_pretrained(tmp_path / "network")
    assert set(loaded.heads) == {"mine"}
    assert loaded.heads["mine"].options == network.heads["parallel"].options


def test_a_config_with_fewer_layers_than_the_file_is_refused(network, tmp_path):
    """transformers would load it, and say nothing: a trunk cut short."""
    Network(network.trunk).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"has weights of layer 3, but its config.json says 3 layers"):
        Network.from_pretrained(tmp_path)


def test_a_cast_leaves_the_rotary_frequencies_in_float32():
    network = tiny_network()
    rotary = network.trunk.model.model.rotary_emb
    before = rotary.inv_freq.clone()
    network.to(torch.bfloat16)
    assert network.trunk.dtype == torch.bfloat16
    assert torch.equal(rotary.inv_freq, before)
