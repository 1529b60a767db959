"""A tiny model with a byte-level tokenizer, and a small OpenAI-compatible server around it.

The server is written apart from the backends that it tests: one row at a time, no padding, its own arithmetic.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    letters = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(letters)}, [("Ġ", "t"), ("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=0, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def adapter_directory(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(
        LlamaForCausalLM.from_pretrained(model_directory), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.4)
    directory = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(str(directory))
    return directory


class Server:
    """Serves `base` and `tuned`; `judge_says` is what it answers to prompts that speak of criteria."""

    def __init__(self, directory: Path, adapter: Path) -> None:
        from peft import PeftModel

        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        plain: Any = LlamaForCausalLM.from_pretrained(directory)
        tuned: Any = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(directory), str(adapter))
        self.models = {"base": plain.eval(), "tuned": tuned.eval()}
        self.judge_says = ['{"good": 4}']
        self.busy = 0  # answers of 503 before the next real one
        self.lock = threading.Lock()

    def greedy(self, name: str, ids: list[int], count: int) -> list[int]:
        new: list[int] = []
        with torch.no_grad():
            while len(new) < count:
                logits = self.models[name](input_ids=torch.tensor([ids + new])).logits[0, -1]
                new.append(int(logits.argmax()))
                if new[-1] == 0:
                    break
        return new

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            if path == "/v1/chat/completions":
                said = body["messages"][-1]["content"]
                if "Criteria:" in said:
                    text = self.judge_says[min(body["seed"], len(self.judge_says) - 1)]
                else:
                    ids = self.tokenizer.apply_chat_template(
                        body["messages"], add_generation_prompt=True, return_dict=True
                    )["input_ids"]
                    new = self.greedy(body["model"], ids, body["max_tokens"])
                    text = self.tokenizer.decode(new, skip_special_tokens=True)
                return {"choices": [{"message": {"role": "assistant", "content": text}}]}
            prompt = body["prompt"]
            ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            new = self.greedy(body["model"], ids, body["max_tokens"])
            if not body.get("echo"):
                return {"choices": [{"text": self.tokenizer.decode(new, skip_special_tokens=True)}]}
            found = self.logprobs(body["model"], ids + new, offsets=isinstance(prompt, str))
            return {"choices": [{"text": "", "logprobs": found}]}

    def logprobs(self, name: str, ids: list[int], offsets: bool) -> dict[str, Any]:
        with torch.no_grad():
            scores = self.models[name](input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        found = [None, *(float(scores[place, token]) for place, token in enumerate(ids[1:]))]
        starts = [len(self.tokenizer.decode(ids[:place])) for place in range(len(ids))] if offsets else []
        return {"token_logprobs": found, "text_offset": starts}


@pytest.fixture(scope="session")
def serving(model_directory: Path, adapter_directory: Path) -> Iterator[tuple[str, Server]]:
    server = Server(model_directory, adapter_directory)

    class Handler(BaseHTTPRequestHandler):
        def reply(self, code: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "base"}, {"id": "tuned"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if server.busy:
                server.busy -= 1
                self.reply(503, {"error": {"message": "busy"}})
            elif body["model"] not in server.models:
                self.reply(404, {"error": {"message": f"no model {body['model']}"}})
            else:
                self.reply(200, server.answer(self.path, body))

        def log_message(self, *_words: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/v1", server
    http.shutdown()
    thread.join()
    http.server_close()
