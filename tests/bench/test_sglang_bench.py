"""`bench/sglang/run.py` against a stand-in for SGLang's server, which answers requests by a rule: every step runs, the
document says what differs, and a server that dies is a failed step and not the end of the run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "sglang"
SERVER = """
import argparse, http.server, json, os, sys

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--kt-num-gpu-experts", type=int)
parser.add_argument("--kt-method")
args, _ = parser.parse_known_args()
if args.kt_method == "AMXINT4":
    sys.exit("RuntimeError: a stand-in that does not start")
wrong = args.kt_num_gpu_experts == 1  # another answer


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = body["input_ids"]
        several = isinstance(ids[0], list)
        answers = [self.answer(one, body) for one in (ids if several else [ids])]
        self.reply(answers if several else answers[0])

    def answer(self, ids, body):
        drawn = [sum(ids) % 97 + step + wrong for step in range(body["sampling_params"]["max_new_tokens"])]
        return {
            "output_ids": drawn,
            "meta_info": {
                "input_token_logprobs": [[None, ids[0], None], *([-1.0 - 0.5 * wrong, one, None] for one in ids[1:])],
                "output_token_logprobs": [[-2.0, one, None] for one in drawn],
            },
        }

    def reply(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


http.server.ThreadingHTTPServer.request_queue_size = 64  # 16 clients connect at once; the default of 5 refuses some
http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
"""


def load_module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    for other in ("pack", "server", name):
        monkeypatch.delitem(sys.modules, other, raising=False)
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, made)
    spec.loader.exec_module(made)
    return made


@pytest.mark.slow
def test_every_step_is_in_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site" / "sglang"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("")
    (site / "launch_server.py").write_text(SERVER)
    parts = tmp_path / "parts"
    parts.mkdir()
    with tarfile.open(tmp_path / "whole.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "site", ".")
    pack = load_module("pack", monkeypatch)
    pack.split(tmp_path / "whole.tar.xz", parts, 500)
    assert len(list(parts.iterdir())) > 1
    run = load_module("run", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", "")
    words = ["--parts", str(parts), "--work", str(tmp_path / "work"), "--json", str(tmp_path / "out.json")]
    words += ["--tiny", "--layers", "1", "--load-seconds", "1", "--start-timeout", "30", "--load-variant", "kt32"]
    assert run.main([*words, "unpack", "model", "plain", "kt32"]) == 0
    assert run.main([*words, "load+kt1+int4", "restart"]) == 1  # int4 does not start
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert set(steps) == {"unpack", "model", "plain", "kt32", "load", "kt1", "int4", "restart"}
    assert steps["plain"]["noise"]["logprob_max"] == 0 and steps["plain"]["streams_16"]["best"] > 0
    assert steps["kt32"]["against_plain"]["same_answers"] == steps["kt32"]["against_plain"]["answers"] == 6
    assert steps["kt1"]["against_plain"]["same_answers"] == 0
    assert steps["kt1"]["against_plain"]["logprob_max"] == 0.5 and "streams_1" not in steps["kt1"]
    assert "does not start" in steps["int4"]["failed"]
    assert steps["load"]["answered"] > 0 == steps["load"]["errors"] and steps["load"]["anonymous_mib"][0] > 0
    assert steps["load"]["load_seconds"] == 1 < steps["load"]["seconds"]
    assert steps["restart"]["processes_left"] == 0
    assert steps["restart"]["against_plain"]["same_answers"] == 6


@pytest.mark.parametrize("word", ["compile_worker/__main__.py", "scheduler"])
def test_compile_workers_are_counted_apart(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_module("server", monkeypatch)
    server = module.Server("name", 0, [], {}, tmp_path / "log")
    program = "import sys; held = b'1' * (50 << 20); print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", program, word]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        server.process = process
        memory = server.memory_mib()
        process.communicate()
    counted, other = ("compile_workers", "anonymous") if "compile" in word else ("anonymous", "compile_workers")
    assert memory[counted] > 50 and memory[other] == 0
