"""The page at `/` in a real browser: columns answer one prompt, answers are drawn and never run, stop and retry,
adapters are loaded, a training is found and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.browser import BINARY, Page, browsing
from tests.support.serving import EngineHarness, make_service, run_app

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BINARY is None, reason="no Chromium here")]
ATTACK = "<img src=x onerror='window.hit = 1'><script>window.hit = 2</script>\n\n**bold**\n\n```py\nx < y\n```"
INJECT = """
const holder = document.createElement("div");
holder.innerHTML = "<img src=x onerror='window.hit = 3'>";
document.body.append(holder);
new Promise((done) => setTimeout(done, 500)).then(() => 1)
"""


def ask(page: Page, tokens: int) -> None:
    page.run(f"at('tokens').value = {tokens}; at('prompt').value = 'Hello'; at('ask').requestSubmit(); 1")


def test_columns_answer_stop_and_retry(harness: EngineHarness, adapters: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    from ktransformers.serve.http.api import create_app

    app = create_app(make_service(harness, adapters))
    with run_app(app) as url, browsing(url, tmp_path / "profile") as page:
        page.wait("typeof columns !== 'undefined' && columns.length === 2")
        assert page.run("columns.map((one) => one.picker.value)") == ["tiny", "tiny:one"]
        page.run("at('add').click(); 1")
        assert page.run("columns[2].picker.value") == "tiny:attention"
        ask(page, 12)
        page.wait("columns.every((one) => !one.running && one.speed.textContent)", 120)
        speeds = page.run("columns.map((one) => one.speed.textContent)")
        assert all(speed.startswith("12 tokens, ") and speed.endswith("tokens/s") for speed in speeds)
        texts = page.run("columns.map((one) => one.messages[1].content)")
        assert all(texts) and len(set(texts)) == 3, "the base and two adapters"
        page.run("columns[0].again.click(); 1")
        page.wait("!columns[0].running && columns[0].speed.textContent", 60)
        assert page.run("columns[0].messages.length") == 2 and page.run("columns[0].messages[1].content") == texts[0]
        assert page.run("columns[0].talk.children.length") == 2, "the answer took the place of the first one"
        ask(page, 400)
        page.wait("columns.every((one) => one.running)")
        assert page.run("at('send').textContent") == "Stop"
        page.run("at('ask').requestSubmit(); 1")
        page.wait("columns.every((one) => !one.running)", 30)
        assert page.run("columns.map((one) => one.speed.textContent)") == ["stopped"] * 3
        page.run("columns[1].close.click(); at('clear').click(); 1")
        left = page.run("columns.map((one) => [one.picker.value, one.messages.length])")
        assert left == [["tiny", 0], ["tiny:attention", 0]]
        page.run("at('temperature').value = 1; at('top-k').value = 5; at('seed').value = 7; at('min-p').value = ''; 1")
        assert page.run("sampling()") == {"temperature": 1, "top_k": 5, "max_tokens": 400, "seed": 7}
        assert not page.errors
        assert page.requests and all(one.startswith(url) or one == "data:," for one in page.requests)


def test_answers_are_drawn_and_never_run(harness: EngineHarness, adapters: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    from ktransformers.serve.http.api import create_app

    with run_app(create_app(make_service(harness, adapters))) as url, browsing(url, tmp_path / "profile") as page:
        page.wait("typeof columns !== 'undefined' && columns.length === 2")
        page.run(f"say(columns[0], 'assistant', '').append(...nodes(markdown({json.dumps(ATTACK)}))); 1")
        assert page.run("document.querySelectorAll('.talk img, .talk script').length") == 0
        assert "onerror" in page.run("columns[0].talk.textContent")
        assert page.run("document.querySelector('.talk strong').textContent") == "bold"
        assert page.run("document.querySelector('.talk pre code').textContent") == "x < y"
        page.run(INJECT)
        assert page.run("window.hit === undefined"), "the policy is the second barrier: markup in the page does not run"
        for width in (360, 1280):
            page.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=740, deviceScaleFactor=1, mobile=width < 700
            )
            assert page.run("document.documentElement.scrollWidth") <= width, "nothing is wider than the screen"


def test_adapter_is_loaded_and_training_found(
    harness: EngineHarness, adapters: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("fastapi")
    from ktransformers.serve.http.api import create_app
    from ktransformers.serve.http.boundary import AccessRules
    from ktransformers.serve.http.training import TrainingRuns

    lines = [
        {"current_steps": step, "total_steps": 9, "loss": 4 - step / 4, "lr": 1e-4, "grad_norm": 1.0, "throughput": 5.0}
        for step in range(1, 9)
    ]
    lines.append({"current_steps": 8, "total_steps": 9, "eval_loss": 2.5})
    training = tmp_path / "saves" / "run"
    training.mkdir(parents=True)
    (training / "trainer_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    service = make_service(harness, adapters)
    app = create_app(service, rules=AccessRules("k"), training=TrainingRuns(roots=lambda: [tmp_path]))
    with run_app(app) as url, browsing(url, tmp_path / "profile") as page:
        page.wait("typeof columns !== 'undefined' && at('notice').textContent.includes('API key')")
        page.run("at('key').value = 'k'; at('key').dispatchEvent(new Event('change')); 1")
        page.wait("columns.length === 2")
        page.run("at('tab-training').click(); 1")
        page.wait("logged.length === 9")
        assert page.run("at('training-state').textContent") == f"{training}: step 8 of 9"
        assert page.run("document.querySelectorAll('#curves svg').length") == 4
        assert page.run("document.querySelectorAll('#curves polyline').length") == 4
        assert page.run("document.querySelectorAll('#curves circle').length") == 1, "one value of the held-out loss"
        page.run("at('tab-server').click(); 1")
        page.wait("samples.length > 1")
        assert "tokens/s" in page.run("at('metrics').textContent") and " GB of " in page.run(
            "at('metrics').textContent"
        )
        page.run(f"at('adapter-path').value = {json.dumps(str(adapters['two']))}; at('load').click(); 1")
        page.wait("models.length === 4", 60)
        assert set(service.registry.loaded) == {"one", "attention", "two"}
        page.run("at('tab-chat').click(); at('add').click(); at('add').click(); 1")
        assert page.run("columns.map((one) => one.picker.value)")[2:] == ["tiny:attention", "tiny:two"]
        page.run("[...document.querySelectorAll('#adapters button')].pop().click(); 1")
        page.wait("models.length === 3")
        assert set(service.registry.loaded) == {"one", "attention"}
        assert page.run("columns[3].picker.value") == "tiny", "an unloaded adapter leaves its column to the base"
        page.run("at('adapter-path').value = '/nowhere'; at('load').click(); 1")
        page.wait("at('adapter-state').textContent.includes('/nowhere')")
        assert page.picture()[:4] == b"\x89PNG"
