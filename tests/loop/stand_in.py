"""`kt` as a loop sees it, without models: each verb writes the files and prints the document that the real one would.

Every call is noted in $CALLS. `train` stops half-way, after a checkpoint, for as long as $HALT exists, and takes $SLOW
seconds. $BROKEN names what fails: eval, prove (it dies), verdict (it says that nothing is proven), or training with one
learning rate (lr0.5). Verbs import what they need themselves: a loop starts ten of them, the tests hundreds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def tell(title: str, done: int, total: int, values: dict[str, float]) -> None:
    """Progress, as the real verbs report it to a loop."""
    event = {"title": title, "done": done, "total": total, "values": values}
    os.write(int(os.environ["KT_PROGRESS"]), json.dumps(event).encode() + b"\n")


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def train(words: list[str]) -> None:
    import yaml

    keys: dict[str, Any] = yaml.safe_load(Path(words[0]).read_text())
    keys |= {word.partition("=")[0]: yaml.safe_load(word.partition("=")[2]) for word in words[1:] if "=" in word}
    if "--dry-run" in words:
        data = {"tokens": 1000, "steps_per_epoch": 10, "steps": keys.get("max_steps", 50), "question": "Why?"}
        summary = {"fits": "yes, everything on the CPU", "time": "about 1 h", "memory": "2 GB of 9 GB free memory"}
        forecast = {"tokens_per_second": 100.0, "seconds": 1.0, "disk": {"checkpoint": 10**9}}
        document = {"datasets": [{"name": "d", "file": keys["dataset"], "rows": 1}], "data": data, "device": "cpu"}
        say(json.dumps(document | {"summary": summary, "forecast": forecast}))
        return
    output, steps = Path(keys["output_dir"]), int(keys["max_steps"])
    output.mkdir(parents=True, exist_ok=True)
    say(f"step 1/{steps}  loss 3")
    if os.environ.get("BROKEN") == f"lr{keys['learning_rate']}":
        sys.exit("diverged")
    tell("Training", 1, steps, {"loss": 3.0, "tokens_per_second": 200.0, "memory": 2e9})
    time.sleep(float(os.environ.get("SLOW", "0")))  # long enough to be drawn
    (output / "checkpoint-1").mkdir(exist_ok=True)
    while "HALT" in os.environ and Path(os.environ["HALT"]).exists():
        time.sleep(0.02)
    lines = [{"current_steps": 1, "loss": 3.0}, {"current_steps": steps, "throughput": 200.0, "loss": 1.0}]
    (output / "trainer_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (output / "trainer_state.json").write_text(json.dumps({"global_step": steps}))
    (output / "all_results.json").write_text(json.dumps({"train_runtime": 60.0, "train_loss": 1.0}))
    (output / "adapter_config.json").write_text(json.dumps({"steps": steps}))
    (output / "adapter_model.safetensors").write_text(f"{keys['learning_rate']} {steps}")


def evaluate(words: list[str]) -> None:
    if "--dry-run" in words:
        say(json.dumps({"tasks": [{"name": "persona", "items": 3, "work": 300, "data": os.environ["TASK_DATA"]}]}))
        return
    if os.environ.get("BROKEN") == "eval":
        sys.exit("no evaluation")
    out = Path(option(words, "--out"))
    if "--compare" in words:
        runs = words[1 : words.index("--out")]
        adapters = range(len(runs) - 1)
        values = [{"value": 0.0}, *({"value": 80.0 + index} for index in adapters)]
        line = {"metric": "style", "runs": values, "differences": [{"p": 0.001} for _ in adapters]}
        line |= {"more_is_better": True}
        costs = [{"value": 5.0}, *({"value": 6.0} for _ in adapters)]
        cost = {**line, "metric": "perplexity", "runs": costs, "more_is_better": False}
        sample = {"prompt": "Why?", "answers": ["So.", "Nya."]}
        words_task = {"task": "persona", "unrelated": False, "primary": "style", "samples": [sample]}
        words_task |= {"lines": [line, {**line, "metric": "bleu-1"}]}
        other = {"task": "stories", "unrelated": True, "primary": "perplexity", "samples": [], "lines": [cost]}
        for kind in ("md", "json", "html"):
            (out / f"report.{kind}").write_text("{}")
        say(json.dumps({"runs": runs, "tasks": [other, words_task]}))
        return
    name = "base"
    if words[0].startswith("http"):
        import urllib.request

        with urllib.request.urlopen(f"{words[0]}/v1/models") as reply:
            assert reply.status == 200
        name = option(words, "--adapter").partition("=")[0] if "--adapter" in words else "base"
    folder = out / name / "persona"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"task": {"data": os.environ["TASK_DATA"]}}))
    adapter = out.parent / name / "adapter_model.safetensors"
    (folder / "items.jsonl").write_text(adapter.read_text() if adapter.exists() else "")
    say(json.dumps({"results": {}}))


def serve(words: list[str]) -> None:
    import http.server

    class Models(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401 if os.environ.get("API_KEY") else 200)  # no client here sends a key
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = "Nya." if body["model"] == "base:neko" else "So."
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": answer}}]}).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http.server.HTTPServer(("127.0.0.1", int(option(words, "--port"))), Models).serve_forever()


def prove(words: list[str]) -> None:
    broken = os.environ.get("BROKEN")
    if broken == "prove":
        sys.exit("no proof")
    passed = broken != "verdict"
    checks = [{"what": "tensors", "passed": passed}]
    found = {"passed": passed, "culprit": None if passed else "layer 3", "checks": checks, "tokens": 7}
    say(json.dumps(found | {"floor": {"max": 1e-6}, "effect": {"max": 2.0}}))
    sys.exit(not passed)


def model(words: list[str]) -> None:
    folder = Path(option(words, "--out"))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(words[:-3]))
    say("{}")


def version(words: list[str]) -> None:
    say("{}")


VERBS = {"train": train, "eval": evaluate, "serve": serve, "prove": prove, "model": model, "quant": model}

if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb != "version":
        with open(os.environ["CALLS"], "a") as calls:
            calls.write(" ".join(sys.argv[1:]) + "\n")
    (VERBS | {"version": version})[verb](rest)
